"""What the executor and its zygote both know: the limits of a program and the records between them.

Standard library only, and free of side effects: the zygote loads it by path.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["EXIT", "HELLO", "KILL", "LAYERS", "RECORD", "RUN", "STARTED", "Limits", "result_file_bytes"]

RECORD = struct.Struct("!B7xQq")
"""One record on the control socket: kind, program number, detail. Of one size, so a stream carries it."""

RUN, KILL, HELLO, EXIT = 1, 2, 3, 4
"""Kinds. To the zygote: RUN (with the four descriptors of a program) and KILL. From it: HELLO (the detail
is a bit mask over :data:`LAYERS`) and EXIT (the detail is the wait status)."""

LAYERS = ("namespaces", "no-capabilities", "landlock", "seccomp", "rlimits")
"""Every layer of isolation, in the order in which they are applied."""

STARTED = b"\n"
"""First byte of a result file, written once the process is confined. Without it the program never ran."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use.

    Attributes:
        wall_s: Seconds from hand-over to result; enforced from outside the program.
        cpu_s: Processor seconds (whole; the kernel counts them).
        memory_bytes: Address space, the interpreter included.
        output_bytes: Bytes to standard output, and as many to standard error.
        result_bytes: Bytes of the value, encoded as JSON.
        result_depth: How deeply the value's lists and dicts may nest.
        open_files: Descriptors open at once.
    """

    wall_s: float = 5.0
    cpu_s: int = 6
    memory_bytes: int = 512 * 1024 * 1024
    output_bytes: int = 64 * 1024
    result_bytes: int = 4096
    result_depth: int = 16
    open_files: int = 32

    def __post_init__(self) -> None:
        if min(self.wall_s, self.cpu_s, self.output_bytes, self.result_bytes, self.result_depth) <= 0:
            raise ValueError("every limit must be above zero")
        if self.memory_bytes < 64 * 1024 * 1024 or self.open_files < 8:
            raise ValueError("the interpreter itself needs 64 MiB of address space and 8 descriptors")


def result_file_bytes(limits: Limits) -> int:
    """Return how many bytes a result file holds at most: the value, one line of error, and the frame."""
    return limits.result_bytes + 2048

"""What running one model-written program gives, and who can run one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["ProgramExecutor", "ProgramResult", "ProgramStatus"]

ProgramStatus = Literal[
    "ok",
    "syntax_error",
    "error",
    "exit",
    "no_value",
    "result_too_large",
    "timeout",
    "memory_limit",
    "output_limit",
    "refused",
    "crashed",
    "executor_error",
]
"""How a program ended.

``ok``: a value came back. ``error``: it raised. ``exit``: it called exit, sys.exit or os._exit.
``no_value``: it ended without solve(), ``answer`` or output. ``refused``: isolation denied what it tried.
``crashed``: it died of a signal. ``executor_error``: our side failed; infrastructure, not the program.
"""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The end of one program.

    Attributes:
        status: See :data:`ProgramStatus`.
        value: A number, string, bool, None, or (nested) list/dict of them; None unless ``ok``.
        stdout: What it printed, capped.
        error: One line on what went wrong, or None.
        wall_ns: From hand-over to result, in the caller's process.
    """

    status: ProgramStatus
    value: object
    stdout: str
    error: str | None
    wall_ns: int


class ProgramExecutor(Protocol):
    """Runs model-written programs in isolation."""

    async def run(self, code: str, *, arguments: dict[str, object] | None = None) -> ProgramResult:
        """Run ``code`` in a fresh isolated process and return how it ended; never raises for the program.

        Args:
            code: Python source. Its value is what ``solve(**arguments)`` returns if it defines ``solve``,
                or ``answer``, or the last printed line, in that order.
            arguments: Keyword arguments for ``solve``; JSON-serialisable.
        """
        ...

    async def close(self) -> None:
        """Stop every process that belongs to the executor."""
        ...

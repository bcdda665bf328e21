"""Every error that a user can meet, with the exit code that it ends the command line with.

The tree::

    ReuseBenchError            1  a check failed
    ├── UsageError             2  bad input: unknown name, bad value, unreadable configuration
    │   └── RunLocked             (runners.store) another process is writing to the run
    ├── InvalidRun             3  a run finished, but its numbers must not be used
    ├── MissingResource        4  a model, an engine or a data set is not there
    │   ├── ModelMissing
    │   ├── EngineUnavailable
    │   └── DataMissing
    ├── ExecutorFailed         1  our program executor failed, not the program (recorded, never graded)
    └── EngineError            1  one call to an engine failed (recorded per request, never graded)
        ├── EngineTimeout
        ├── EngineRefused      the engine answered with a 4xx: the request is at fault
        └── StreamBroken       the stream ended with no finish reason

A message names the cause and the cure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "DataMissing",
    "EngineError",
    "EngineRefused",
    "EngineTimeout",
    "EngineUnavailable",
    "ExecutorFailed",
    "InvalidRun",
    "MissingResource",
    "ModelMissing",
    "ReuseBenchError",
    "StreamBroken",
    "UsageError",
    "did_you_mean",
]


class ReuseBenchError(Exception):
    """Base of every error that the suite raises on purpose."""

    exit_code = 1


class UsageError(ReuseBenchError):
    """The input is wrong; nothing was changed."""

    exit_code = 2


class InvalidRun(ReuseBenchError):
    """The run's verdict is INVALID."""

    exit_code = 3


class MissingResource(ReuseBenchError):
    """Something that the command needs is not on this machine."""

    exit_code = 4


class ModelMissing(MissingResource):
    """A model file is absent or does not match its pinned hash."""


class EngineUnavailable(MissingResource):
    """An engine could not be started or reached."""


class DataMissing(MissingResource):
    """A data file is absent, empty, or does not match its schema or pinned hash."""


class ExecutorFailed(ReuseBenchError):
    """The executor itself failed: infrastructure, not an answer."""


class EngineError(ReuseBenchError):
    """A call to an engine failed after its tries; infrastructure, not an answer.

    Attributes:
        kind: What failed, in a word; ``error.type`` of the record.
        status: HTTP status, where there was one.
        body: The JSON body of the failed reply, where there was one.
    """

    kind = "engine_error"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        kind: str | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: Mapping[str, Any] = body or {}
        if kind is not None:
            self.kind = kind


class EngineTimeout(EngineError):
    """The engine did not finish within the call's time limit."""

    kind = "timeout"


class EngineRefused(EngineError):
    """The engine answered 4xx; the body's message is passed on."""

    kind = "refused"


class StreamBroken(EngineError):
    """A stream ended without a finish reason, or carried an error object."""

    kind = "truncated_stream"


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` or a listing of what is known; for the end of an error message."""
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=2, cutoff=0.55)
    if close:
        return " Did you mean " + " or ".join(f'"{name}"' for name in close) + "?"
    return f" Known: {', '.join(names)}." if names else ""

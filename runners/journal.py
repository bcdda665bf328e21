"""The journal of a method's state: every change, in order, under the request that made it.

A method's state is the fold of its events (:class:`bench.method.Stateful`). Each event is one line,
written before the method sees it, so that after a kill the state is exactly that of some prefix; the
runner then keeps the events of the requests whose records exist, and drops the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.errors import ReuseBenchError
from bench.method import StateEvent

__all__ = ["Journal", "LineFile", "drop_torn_line", "prune", "write_atomically"]

_PRIVATE = 0o600  # it holds what users asked and were told


class LineFile:
    """Append-only JSON lines that a kill of this process can't lose; none are kept where ``path`` is None."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: int | None = None

    def write_line(self, entry: Mapping[str, Any]) -> None:
        """Write one line; the first one cuts off what a kill left unfinished."""
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE)
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Close the file; :meth:`write_line` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Journal(LineFile):
    """Lines ``{"request", "event"}``; in memory only where ``path`` is None."""

    def read(self) -> Iterator[StateEvent]:
        """Yield the stored events; a torn last line is not an event."""
        for entry in _entries(self.path):
            yield entry["event"]

    def append(self, request_id: str | None, event: StateEvent) -> None:
        """Write one event; when this returns, a kill of this process can't lose it."""
        self.write_line({"request": request_id, "event": event})

    def replace(self, events: Iterable[StateEvent]) -> None:
        """Make ``events`` the whole content, atomically."""
        self.close()
        if self.path is not None:
            _write(self.path, ({"request": None, "event": event} for event in events))


def prune(path: Path, keep: Callable[[str | None], bool]) -> None:
    """Drop the events of every request that ``keep`` refuses, and a torn last line, atomically."""
    if path.exists():
        _write(path, [entry for entry in _entries(path) if keep(entry["request"])])


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a whole file so that a reader, or a kill, sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _entries(path: Path | None) -> Iterator[dict[str, Any]]:
    if path is None or not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        torn = number == len(lines)  # what follows the last newline was cut off while being written
        if not line or torn:
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or not {"request", "event"} <= entry.keys():
                raise ValueError("no request and event in it")
        except ValueError as error:
            raise ReuseBenchError(
                f"{path}, line {number}: damaged state ({error}). Delete the file to start empty."
            ) from error
        yield entry


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last newline: the next line would become one with it, and both be lost."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _write(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries), _PRIVATE)

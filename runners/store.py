"""The run store: one folder per run, with its records and everything needed to know what produced them."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bench.errors import ReuseBenchError, UsageError, did_you_mean
from bench.records import SCHEMA_VERSION, BackgroundRecord, Record
from runners.journal import drop_torn_line, write_atomically

__all__ = ["Run", "RunLocked", "find_run", "list_runs"]


class RunLocked(UsageError):
    """Another process is writing to the run."""


M = TypeVar("M", bound=BaseModel)


class Run:
    """A run's folder: ``run.json``, the two .jsonl files, ``cache/``, ``calls/``, ``logs/`` and
    ``report/``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._files: dict[str, int] = {}

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def resume_command(self) -> str:
        """What goes on with the run; it names the folder, which need not be under the default one."""
        return f"reusebench resume {shlex.quote(str(self.path))}"

    @classmethod
    def create(cls, root: Path, experiment: str, facts: dict[str, Any]) -> Run:
        """Make a new run's folder under ``root`` and write its ``run.json``; the run is locked for writing.

        Raises:
            UsageError: The folder can't be made.
        """
        now = datetime.now(UTC)
        name = f"{now:%Y%m%dT%H%M%SZ}-{experiment}-{secrets.token_hex(3)}"
        run = cls(root / name)
        try:
            run.path.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"Can't make the run's folder {run.path}: {error.strerror}.") from error
        for folder in ("cache", "logs"):
            (run.path / folder).mkdir()
        run.lock()
        created = now.isoformat(timespec="seconds")
        run.write({"schema_version": SCHEMA_VERSION, "id": name, "created": created, **facts})
        return run

    def read(self) -> dict[str, Any]:
        """Return ``run.json``.

        Raises:
            UsageError: It is absent, damaged, or of a newer schema than this version reads.
        """
        path = self.path / "run.json"
        try:
            facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(facts, dict):
                raise ValueError("no JSON object")
        except FileNotFoundError as error:
            raise UsageError(f"{self.path} is no run: it has no run.json.") from error
        except ValueError as error:
            raise UsageError(f"{path} is damaged: {error}.") from error
        found = facts.get("schema_version")
        if found != SCHEMA_VERSION:
            writer = facts.get("packages", {}).get("reusebench")
            raise UsageError(
                f"{path} has schema version {found}; this reusebench reads {SCHEMA_VERSION}. "
                f"Use the version that wrote it ({writer})."
            )
        return facts

    def write(self, facts: dict[str, Any]) -> None:
        """Replace ``run.json`` atomically."""
        text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(self.path / "run.json", text + "\n")

    def update(self, **changes: Any) -> dict[str, Any]:
        """Change some top-level fields of ``run.json`` and return the whole."""
        facts = {**self.read(), **changes}
        self.write(facts)
        return facts

    def lock(self) -> None:
        """Become the run's one writer, until :meth:`close` or the end of this process.

        Raises:
            RunLocked: Another process is.
        """
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise RunLocked(
                f"{self.id} is being written by another process; wait for it, or stop it."
            ) from error
        self._lock = handle

    @property
    def written_elsewhere(self) -> bool:
        """Whether another process is writing to the run at this moment."""
        if self._lock is not None:
            return False
        probe = Run(self.path)
        try:
            probe.lock()
        except RunLocked:
            return True
        probe.close()
        return False

    @property
    def status(self) -> str:
        """``running``, ``complete``, ``interrupted`` or ``failed``; ``killed`` where a writer left no word.

        Raises:
            UsageError: As :meth:`read`.
        """
        status = str(self.read().get("status"))
        alive = self._lock is not None or self.written_elsewhere
        return "killed" if status == "running" and not alive else status

    def append(self, record: Record) -> None:
        """Write one record; when this returns, a kill of this process can't lose it.

        Raises:
            ReuseBenchError: The disk does not take it.
        """
        self._append("records.jsonl", record)

    def append_background(self, record: BackgroundRecord) -> None:
        """As :meth:`append`, for work beside the requests."""
        self._append("background.jsonl", record)

    def _append(self, name: str, record: BaseModel) -> None:
        handle = self._files.get(name)
        if handle is None:
            drop_torn_line(self.path / name)
            handle = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._files[name] = handle
        line = _line(record)
        try:
            while line:
                line = line[os.write(handle, line) :]
        except OSError as error:
            # What was written of the line is torn, and dropped before the next record is appended.
            raise ReuseBenchError(
                f"Can't write to {self.path}: {error.strerror}. Make room, then: {self.resume_command}"
            ) from error

    def records(self) -> list[Record]:
        """Return every record, in the order written; a torn last line is ignored with a warning.

        Raises:
            ReuseBenchError: Another line is damaged; the message names it.
        """
        return self._read_lines("records.jsonl", Record)

    def background(self) -> list[BackgroundRecord]:
        """As :meth:`records`, for work beside the requests."""
        return self._read_lines("background.jsonl", BackgroundRecord)

    def _read_lines(self, name: str, model: type[M]) -> list[M]:
        path = self.path / name
        if not path.exists():
            return []
        *lines, rest = path.read_bytes().split(b"\n")
        if rest:
            text = f"{path}: the last line was cut off while being written; ignored"
            warnings.warn(text, stacklevel=1)  # said once, however many callers read the file
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(model.model_validate_json(line))
            except ValidationError as error:
                fault = error.errors()[0]
                place = ".".join(str(part) for part in fault["loc"])
                raise ReuseBenchError(
                    f"{path}, line {number}: no valid record ({place + ': ' if place else ''}{fault['msg']})."
                ) from error
        return found

    def replace_records(self, records: Iterable[Record]) -> None:
        """Replace all records atomically (for regrading)."""
        handle = self._files.pop("records.jsonl", None)
        if handle is not None:
            os.close(handle)
        write_atomically(self.path / "records.jsonl", b"".join(map(_line, records)).decode())

    def close(self) -> None:
        """Close the files and give up the lock."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _line(record: BaseModel) -> bytes:
    # NaN and infinity are no JSON; pydantic writes them as null, which is what "missing" is.
    return record.model_dump_json().encode() + b"\n"


def list_runs(root: Path) -> list[Run]:
    """Return the runs under ``root``, oldest first."""
    if not root.is_dir():
        return []
    return [Run(path) for path in sorted(root.iterdir()) if (path / "run.json").exists()]


def find_run(root: Path, name: str) -> Run:
    """Return a run by its folder, its id, a unique part of its id, or ``latest``.

    Raises:
        UsageError: None, or more than one, fits.
    """
    if (Path(name) / "run.json").exists():
        return Run(Path(name))
    runs = list_runs(root)
    if not runs:
        raise UsageError(f"There are no runs under {root}. `reusebench run --help` shows how to make one.")
    if name == "latest":
        return max(runs, key=lambda run: run.id)
    found = [run for run in runs if run.id == name] or [run for run in runs if name in run.id]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name!r} fits {len(found)} runs: {', '.join(run.id for run in found[:5])}.")
    raise UsageError(f"There is no run {name!r} under {root}.{did_you_mean(name, [run.id for run in runs])}")

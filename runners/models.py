"""The model store: pinned files, fetched once, used only with the pinned SHA-256.

Layout, under ``${REUSEBENCH_CACHE:-${XDG_CACHE_HOME:-~/.cache}/reusebench}/models``::

    <sha256>/<file>           a checked file
    <sha256>/verified.json    its size and mtime when its hash was last checked
    <sha256>.partial/         a pull in progress, or one that was stopped and can go on
    <sha256>.lock             held by the process that pulls

A file reaches its place by one rename, after its hash was checked: what is there is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

from bench.config import read_toml, validate
from bench.errors import ModelMissing, UsageError, did_you_mean
from bench.paths import cache_root
from runners.model_sources import SOURCES, Carriers, ModelFile, Progress, Source, SourceFailed, from_source

__all__ = [
    "Carriers",
    "ModelFile",
    "ModelStatus",
    "Progress",
    "Source",
    "catalogue",
    "model_file",
    "path",
    "pull",
    "status",
    "store",
    "verify",
]

CATALOGUE = Path(__file__).with_name("models.toml")

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What the store has of one model.

    Attributes:
        model: The catalogue's entry.
        state: ``ready`` (hash checked, unchanged since); ``unchecked`` (right size, but changed or
            never hashed: the next use hashes it); ``damaged`` (wrong size); ``partial`` (a stopped
            pull); ``absent``.
        path: Where the file is or would be.
        bytes: Bytes of it that are on disk.
    """

    model: ModelFile
    state: Literal["ready", "unchecked", "damaged", "partial", "absent"]
    path: Path
    bytes: int


def catalogue() -> Mapping[str, ModelFile]:
    """Return every pinned model by name, in the catalogue's order."""
    return _read_catalogue(CATALOGUE)


@lru_cache
def _read_catalogue(file: Path) -> Mapping[str, ModelFile]:
    entries = read_toml(file)["models"]
    return {name: validate(ModelFile, {"name": name, **entry}, str(file)) for name, entry in entries.items()}


def model_file(name: str) -> ModelFile:
    """Return the catalogue's entry.

    Raises:
        UsageError: No such model; says which was meant.
    """
    known = catalogue()
    if name not in known:
        raise UsageError(f'There is no model "{name}" in the store.{did_you_mean(name, known)}')
    return known[name]


def store() -> Path:
    """Return the store's folder; it may not exist yet."""
    return cache_root() / "models"


def status(name: str) -> ModelStatus:
    """Say what the store has of a model, in milliseconds: sizes and stamps, no hashing.

    Raises:
        UsageError: No such model.
    """
    model = model_file(name)
    target = _target(model)
    if target.is_file():
        size = target.stat().st_size
        if size != model.bytes:
            return ModelStatus(model, "damaged", target, size)
        return ModelStatus(model, "ready" if _stamped(model) else "unchecked", target, size)
    work = _work(model)
    # What a pull can go on from: finished parts, and the hub's download; not the joined candidate.
    kept = [*work.glob("part-*.bin"), *work.glob("hub.part")] if work.is_dir() else []
    have = sum(file.stat().st_size for file in kept)
    return ModelStatus(model, "partial" if have else "absent", target, have)


def path(name: str) -> Path:
    """Return the checked file of a model.

    Its hash is computed only where the file's size or mtime changed since the last check.

    Raises:
        UsageError: No such model.
        ModelMissing: Absent, incomplete or damaged; the message names the command that fetches it.
    """
    now = status(name)
    if now.state in ("absent", "partial"):
        raise ModelMissing(
            f"The model {name} ({now.model.bytes / 1e6:,.1f} MB) is not in {store()}. "
            "Run `reusebench models pull` to fetch it."
        )
    return now.path if now.state == "ready" else verify(name)


def verify(name: str, progress: Progress | None = None) -> Path:
    """Hash a model's file, whatever the stamp says, and return its path.

    Raises:
        UsageError: No such model.
        ModelMissing: Absent, or its size or hash is not the pinned one.
    """
    model = model_file(name)
    target = _target(model)
    if not target.is_file():
        return path(name)  # raises with what is there
    size = target.stat().st_size
    digest = _hash(model, target, progress or _silent) if size == model.bytes else None
    if digest != model.sha256:
        with contextlib.suppress(OSError):  # a store that can't be written to: the error below stands
            _stamp(model).unlink(missing_ok=True)
        what = f"SHA-256 {digest}" if digest else f"{size:,} bytes instead of {model.bytes:,}"
        raise ModelMissing(
            f"{target} is damaged: {what}. Run `reusebench models pull` to replace it by a good copy."
        )
    _write_stamp(model)
    return target


def pull(name: str, progress: Progress | None = None, sources: Sequence[str] = tuple(SOURCES)) -> Path:
    """Make a model's file present and checked, and return its path.

    A good file that is there already is kept. A stopped pull goes on where it stopped. Two processes
    may pull the same model: the second waits, and finds the file.

    Args:
        name: Name in the catalogue.
        progress: Called as bytes arrive.
        sources: Which sources to try, in this order: ``local``, ``hub``, ``index``.

    Raises:
        UsageError: No such model or source.
        ModelMissing: No source could give the file; the message has each one's reason.
    """
    model = model_file(name)
    say = progress or _silent
    for source in sources:
        if source not in SOURCES:
            raise UsageError(f'There is no model source "{source}".{did_you_mean(source, SOURCES)}')
    try:
        store().mkdir(parents=True, exist_ok=True)
        with _lock(model, say):
            if _target(model).is_file():
                with contextlib.suppress(ModelMissing):  # a damaged file is fetched anew
                    return path(name)
            return _fetch(model, say, cast("Sequence[Source]", sources))
    except OSError as error:
        raise ModelMissing(
            f"Can't store the model {name}: {error}. REUSEBENCH_CACHE names another folder for the store."
        ) from error


def _fetch(model: ModelFile, say: Progress, sources: Sequence[Source]) -> Path:
    work = _work(model)
    reasons: list[str] = []
    for source in sources:
        work.mkdir(exist_ok=True)
        try:
            candidate = from_source(source, model, work, say)
        except SourceFailed as failure:
            reasons.append(f"{source}: {failure}.")
            continue
        size = candidate.stat().st_size
        digest = _hash(model, candidate, say)
        if digest == model.sha256:
            return _place(model, candidate)
        # Which of its parts is wrong can't be told, so none is kept.
        shutil.rmtree(work)
        reasons.append(
            f"{source}: the file that it gave is not the pinned one ({size:,} bytes, SHA-256 {digest})."
        )
    with contextlib.suppress(OSError):  # not empty: parts that a later pull goes on from
        work.rmdir()
    raise ModelMissing(
        f"Can't get the model {model.name} ({model.bytes / 1e6:,.1f} MB).\n  "
        + "\n  ".join(reasons)
        + "\nRun `reusebench models pull` again when that is mended (it goes on where it stopped), or put"
        f" {model.file} into a folder and set REUSEBENCH_MODELS to that folder."
    )


def _place(model: ModelFile, candidate: Path) -> Path:
    """Move a checked candidate to its place, durably."""
    target = _target(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with candidate.open("rb") as file:
        os.fsync(file.fileno())
    candidate.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    _write_stamp(model)
    shutil.rmtree(_work(model))
    return target


def _target(model: ModelFile) -> Path:
    return store() / model.sha256 / model.file


def _work(model: ModelFile) -> Path:
    return store() / f"{model.sha256}.partial"


def _stamp(model: ModelFile) -> Path:
    return store() / model.sha256 / "verified.json"


def _stamp_of(model: ModelFile) -> dict[str, int]:
    facts = _target(model).stat()
    return {"bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def _stamped(model: ModelFile) -> bool:
    try:
        seen = json.loads(_stamp(model).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(seen == _stamp_of(model))


def _write_stamp(model: ModelFile) -> None:
    fresh = _stamp(model).with_name(f"verified.{os.getpid()}.json")
    with contextlib.suppress(OSError):  # a read-only store works too: it is hashed at each use
        fresh.write_text(json.dumps(_stamp_of(model)), encoding="utf-8")
        fresh.replace(_stamp(model))


def _hash(model: ModelFile, file: Path, say: Progress) -> str:
    digest = hashlib.sha256()
    total = file.stat().st_size
    done = 0
    with file.open("rb") as data:
        while chunk := data.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            say(model.name, done, total, "checking SHA-256")
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(model: ModelFile, say: Progress) -> Iterator[None]:
    """Hold the model's lock; the kernel lets go of it however this process ends."""
    with (store() / f"{model.sha256}.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(model.name, 0, model.bytes, "waiting for another process that pulls it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(model: str, done: int, total: int, doing: str) -> None:
    """Progress that nobody watches."""

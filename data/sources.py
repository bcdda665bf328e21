"""Third-party data: pinned downloads into the user's cache, and files that the user names.

The pins are in ``sources.toml``. A download is checked against its hash before it takes its place in the
cache, so that a file in the cache is whole; afterwards no network is used.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import tomllib
import urllib.request
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bench.errors import DataMissing, UsageError, did_you_mean
from bench.paths import cache_root

__all__ = ["Source", "cache_folder", "cached", "fetch", "local_file", "source", "sources"]

_TIMEOUT_SECONDS = 60.0
_DATA_FOLDER_VARIABLE = "REUSEBENCH_DATA"


@dataclass(frozen=True, slots=True)
class Source:
    """One pinned file.

    Attributes:
        dataset: Key in ``sources.toml``.
        split: ``train`` or ``test``.
        title: What people call the data set.
        file: Its file name upstream.
        url: Where that revision's raw file is.
        sha256: Hash of the whole file, lower-case hex.
        bytes: Its length.
        revision: The commit of the pin.
        licence: Under which terms upstream gives it away.
    """

    dataset: str
    split: str
    title: str
    file: str
    url: str
    sha256: str
    bytes: int
    revision: str
    licence: str


@cache
def _pins() -> dict[str, Any]:
    return tomllib.loads(files("data").joinpath("sources.toml").read_text(encoding="utf-8"))


def source(dataset: str, split: str) -> Source:
    """Return the pin of a data set's split.

    Raises:
        UsageError: No such data set or split.
    """
    pins = _pins()
    if dataset not in pins:
        raise UsageError(f'There is no pinned data set "{dataset}".{did_you_mean(dataset, pins)}')
    entry = pins[dataset]
    if split not in entry["splits"]:
        raise UsageError(f'{entry["title"]} has no split "{split}".{did_you_mean(split, entry["splits"])}')
    return Source(
        dataset=dataset,
        split=split,
        title=entry["title"],
        revision=entry["revision"],
        licence=entry["licence"],
        **entry["splits"][split],
    )


def cache_folder() -> Path:
    """Return the folder of downloads."""
    return cache_root() / "data"


def sources() -> list[Source]:
    """Return every pinned file."""
    return [source(dataset, split) for dataset, entry in _pins().items() for split in entry["splits"]]


def cached(pin: Source) -> Path:
    """Return where a pinned file is or would be in the cache."""
    return cache_folder() / pin.sha256 / pin.file


def fetch(pin: Source, *, timeout: float = _TIMEOUT_SECONDS) -> Path:
    """Return the path of a pinned file, downloading it on first use.

    Args:
        pin: The file.
        timeout: Seconds that the server may stay silent.

    Raises:
        DataMissing: The download failed, or what arrived (or lies in the cache) has another hash.
    """
    target = cached(pin)
    if target.is_file():
        _check(pin, target.read_bytes(), f"{target}", f"delete {target}, or pass --path FILE")
        return target
    try:
        with urllib.request.urlopen(pin.url, timeout=timeout) as response:
            content: bytes = response.read(pin.bytes + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DataMissing(
            f"{pin.title} ({pin.split}) is not in the cache and could not be downloaded: found {error}; "
            f"wanted {pin.url} ({pin.bytes} bytes, sha256 {pin.sha256}). "
            "Download it yourself and pass --path FILE."
        ) from error
    _check(pin, content, pin.url, "download it yourself and pass --path FILE")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
            part.write(content)
        Path(part.name).replace(target)
    except OSError as error:
        raise DataMissing(
            f"{pin.title} ({pin.split}) arrived but could not be kept: found {error}; wanted to write "
            f"{target}. Point REUSEBENCH_CACHE at a folder that you may write to, or pass --path FILE."
        ) from error
    return target


def _check(pin: Source, content: bytes, where: str, cure: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != pin.sha256:
        raise DataMissing(
            f"{pin.title} ({pin.split}): found {len(content)} bytes with sha256 {found} at {where}; wanted "
            f"{pin.bytes} bytes with sha256 {pin.sha256}. To mend it: {cure}."
        )


def local_file(path: str, *, title: str, file_name: str) -> Path:
    """Return the file that a ``--path`` names.

    A folder stands for its file of the expected name. A relative path that does not exist is looked up in
    the folder that ``REUSEBENCH_DATA`` names, too.

    Raises:
        DataMissing: There is no such file.
    """
    given = Path(path).expanduser()
    tried = [given]
    root = os.environ.get(_DATA_FOLDER_VARIABLE)
    if root and not given.is_absolute():
        tried.append(Path(root) / given)
    for candidate in tried:
        inside = candidate / file_name if candidate.is_dir() else candidate
        if inside.is_file():
            return inside
        if candidate.exists():
            what = f"a folder without {file_name}" if candidate.is_dir() else "something that is not a file"
            raise DataMissing(
                f"{title}: found {what} at {candidate}; wanted a file. "
                f"Pass --path FILE, or --path with a folder that holds {file_name}."
            )
    raise DataMissing(
        f"{title}: found nothing at {' or '.join(map(str, tried))}; wanted {file_name} or a file like it. "
        f"Pass --path FILE, or set {_DATA_FOLDER_VARIABLE} to the folder that the path starts from."
    )

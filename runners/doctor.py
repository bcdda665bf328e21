"""Checks that this machine has what the suite needs, each with its cure."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.config import EngineConfig, Profile
from bench.engine import Role
from bench.errors import ModelMissing, ReuseBenchError
from bench.method import Trace
from bench.registry import names, workload
from bench.workload import Selection
from data.sources import cached, fetch, sources
from methods.execution import IsolatedExecutor
from runners.chat import open_session
from runners.client import InstrumentedClient
from runners.encoder import FILES, SentenceEncoder
from runners.models import model_file, status, store
from runners.pair import start_pair
from runners.serve import free_socket

__all__ = ["Check", "examine"]

_FREE_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        ok: Whether it is as it should be.
        detail: What was found.
        cure: What to do; empty where ``ok``.
        needed: False for what only some features use.
    """

    name: str
    ok: bool
    detail: str
    cure: str = ""
    needed: bool = True


async def examine(profile: Profile, runs: Path, *, engines: bool = True) -> AsyncIterator[Check]:
    """Yield every check of ``profile``, as it is done.

    Args:
        profile: Whose models and engines are meant.
        runs: Folder of runs.
        engines: Also start each engine and ask it for a word.
    """
    yield _python()
    for check in _disk(runs):
        yield check
    yield _port()
    for check in _models(profile):
        yield check
    yield _encoder()
    for check in _data():
        yield check
    yield await _isolation()
    if engines:
        roles: tuple[Role, ...] = ("target", "small") if profile.pair.small else ("target",)
        for role in roles:
            yield await _engine(profile, role)
    yield _browser()


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, version, "" if ok else "Install Python 3.11 or newer.")


def _disk(runs: Path) -> Iterator[Check]:
    for name, folder in (("model store", store()), ("runs", runs.absolute())):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not os.access(there, os.W_OK):
            variable = "REUSEBENCH_CACHE" if name == "model store" else "--runs"
            yield Check(
                f"disk: {name}", False, f"{there} can't be written to", f"Choose another with {variable}."
            )
            continue
        free = shutil.disk_usage(there).free
        ok = free >= _FREE_BYTES
        cure = "" if ok else f"Free {(_FREE_BYTES - free) / 1e9:.1f} GB there."
        yield Check(f"disk: {name}", ok, f"{free / 1e9:.1f} GB free at {folder}", cure)


def _port() -> Check:
    try:
        with free_socket() as sock:
            return Check("ports", True, f"127.0.0.1:{sock.getsockname()[1]} could be taken")
    except ReuseBenchError as error:
        return Check("ports", False, str(error), "Allow listening on 127.0.0.1.")


def _configs(profile: Profile) -> list[tuple[str, EngineConfig]]:
    pair = profile.pair
    both = [("target", pair.target)] + ([("small", pair.small)] if pair.small else [])
    return both


def _models(profile: Profile) -> Iterator[Check]:
    for role, config in _configs(profile):
        if config.kind != "llamacpp" or config.model is None:
            continue
        try:
            found = status(config.model)
        except ReuseBenchError as error:
            yield Check(f"model: {role}", False, str(error), "Name a model of `reusebench models list`.")
            continue
        ok = found.state in ("ready", "unchecked")
        size = model_file(config.model).bytes / 1e6
        yield Check(
            f"model: {role}",
            ok,
            f"{config.model} ({size:,.0f} MB): {found.state}",
            "" if ok else "reusebench models pull",
        )


def _encoder() -> Check:
    found = [status(name) for name in FILES]
    bad = [one.state for one in found if one.state not in ("ready", "unchecked")]
    size = sum(one.model.bytes for one in found) / 1e6
    return Check(
        "model: encoder",
        not bad,
        f"{SentenceEncoder.name} ({size:,.0f} MB): {bad[0] if bad else found[0].state}",
        "reusebench models pull" if bad else "",
        needed=False,  # only methods that embed text use it
    )


def _data() -> Iterator[Check]:
    for name in names("workload"):
        one = workload(name)
        try:
            samples, facts = one.load(Selection(n=1))
        except ReuseBenchError as error:
            yield Check(f"data: {name}", False, str(error), "Reinstall reusebench.")
            continue
        detail = f"built-in samples, version {one.version}, SHA-256 {facts.sha256[:12]}…"
        yield Check(f"data: {name}", bool(samples), detail)
    for pin in sources():
        if cached(pin).exists():
            name = f"data: {pin.title} ({pin.split})"
            try:
                yield Check(name, True, f"{fetch(pin)}: SHA-256 as pinned")
            except ReuseBenchError as error:
                yield Check(name, False, str(error), f"Delete {cached(pin)}.", needed=False)
    folder = os.environ.get("REUSEBENCH_DATA")
    if folder is not None:
        ok = Path(folder).is_dir()
        cure = "" if ok else "Set REUSEBENCH_DATA to a folder that exists, or unset it."
        yield Check("data: REUSEBENCH_DATA", ok, folder, cure, needed=False)


async def _isolation() -> Check:
    async with IsolatedExecutor() as executor:
        result = await executor.run("answer = 6 * 7")
        ok = result.status == "ok" and result.value == 42
        layers = ", ".join(executor.layers()) or "none"
    detail = f"layers: {layers}" if ok else f"{result.status}: {result.error}"
    return Check("program isolation", ok, detail, "" if ok else "See the README, section on isolation.")


async def _engine(profile: Profile, role: Role) -> Check:
    try:
        with tempfile.TemporaryDirectory() as logs:
            async with (
                start_pair(profile.pair, [role], Path(logs)) as pair,
                open_session(reuse=False) as session,
            ):
                client = InstrumentedClient(session, pair.endpoints[role], role, Trace(0))
                message = {"role": "user", "content": "Say yes."}
                done = await client.chat(
                    [message], purpose="answer", params={"max_tokens": 4, "temperature": 0}
                )
    except ReuseBenchError as error:
        missing = isinstance(error, ModelMissing)
        cure = "reusebench models pull" if missing else "Do as the message says; it comes from the engine."
        return Check(f"engine: {role}", False, str(error), cure)
    return Check(f"engine: {role}", True, f"answers ({done.call.tokens_out} tokens)")


def _browser() -> Check:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    cure = "" if found else "Only a test of the report uses one; install chromium to run it."
    return Check("browser", found is not None, found or "no Chromium found", cure, needed=False)

"""A pair of running engines: a target, and a small engine where some method calls one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.config import EngineConfig, PairConfig
from bench.engine import Role
from bench.errors import EngineUnavailable, UsageError
from bench.registry import engine_class, variant
from runners.client import Endpoint
from runners.engines.base import Engine

__all__ = ["SPECULATIVE", "Pair", "engines_of", "make_engines", "start_pair"]


SPECULATIVE = "target+specdec"
"""The target with speculative decoding: an engine of its own beside the plain target."""


def engines_of(method: str, roles: Iterable[Role]) -> dict[Role, str]:
    """Return which engine stands in which role for a method: its target may decode speculatively.

    Raises:
        UsageError: A method ``+specdec`` that calls no target.
    """
    names: dict[Role, str] = {role: role for role in roles}
    if variant(method).specdec:
        if "target" not in names:
            raise UsageError(f"{method}: it calls no target, so there is nothing to decode speculatively.")
        names["target"] = SPECULATIVE
    return names


class Pair:
    """Running engines by name (``target``, ``small``, ``target+specdec``), and how to call them."""

    def __init__(self, engines: Mapping[str, Engine], endpoints: Mapping[str, Endpoint]) -> None:
        self.engines = engines
        self.endpoints = endpoints

    def endpoints_of(self, method: str, roles: Iterable[Role]) -> dict[Role, Endpoint]:
        """Return the endpoints that a method gets, by role."""
        return {role: self.endpoints[name] for role, name in engines_of(method, roles).items()}

    async def probe(self) -> dict[str, Any]:
        """Return each engine's facts for ``run.json``; None for a role without an engine."""
        found: dict[str, Any] = {"target": None, "small": None}
        return found | {name: await engine.probe() for name, engine in self.engines.items()}

    async def reset_caches(self) -> dict[str, bool]:
        """Clear the prefix cache of each engine; False where an engine can't."""
        return {name: await engine.reset_cache() for name, engine in self.engines.items()}

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every engine answers again (after a crash and its restart); False if one does not."""
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            for endpoint in self.endpoints.values():
                while not await _answers(session, endpoint):
                    if time.monotonic() > deadline:
                        return False
                    await asyncio.sleep(0.5)
        return True


async def _answers(session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
    try:
        async with session.get(f"{endpoint.url}/models", headers=endpoint.headers()) as reply:
            return reply.status < 500
    except (aiohttp.ClientError, TimeoutError):
        return False


def make_engines(config: PairConfig, names: Iterable[str]) -> dict[str, Engine]:
    """Return the engines of these names, checked and not started.

    Raises:
        UsageError: The pair has no such engine, or one is misconfigured.
    """
    configs: dict[str, EngineConfig | None] = {
        "target": config.target,
        "small": config.small,
        SPECULATIVE: config.speculative(),
    }
    engines: dict[str, Engine] = {}
    for name in names:
        one = configs[name]
        if one is None:
            raise UsageError(_absent(name, config))
        engines[name] = engine_class(one.kind)(one, name)
    return engines


def _absent(name: str, config: PairConfig) -> str:
    if name != SPECULATIVE:
        return f"This profile has no {name} engine; set pair.{name} (see `reusebench run --help`)."
    kind = (config.specdec or config.target).kind
    if kind == "llamacpp":
        return (
            "Speculative decoding needs a drafter: set pair.small to a llamacpp engine, or pair.specdec to "
            "the target with a `drafter`."
        )
    return (
        f"Speculative decoding is the business of the target's server, which is of kind {kind}: set "
        "pair.specdec to an engine that serves the same model with it."
    )


@asynccontextmanager
async def start_pair(config: PairConfig, names: Iterable[str], log_dir: Path) -> AsyncIterator[Pair]:
    """Start the engines of these names side by side, and stop them at the end, whatever happens.

    Raises:
        UsageError: As :func:`make_engines`.
        ModelMissing, EngineUnavailable: An engine did not come up.
    """
    engines = make_engines(config, names)
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            stack.push_async_callback(engine.stop)
        urls = await asyncio.gather(
            *(engine.start(log_dir) for engine in engines.values()), return_exceptions=True
        )
        for url in urls:
            if isinstance(url, BaseException):
                raise url
        endpoints = {
            name: Endpoint(
                url=str(url),
                model=getattr(engine, "model", None) or engine.config.model,
                api_key_env=engine.config.api_key_env if engine.config.kind == "openai" else None,
                params=engine.config.params,
                timeout_s=engine.config.timeout_s,
                tries=engine.config.tries,
            )
            for (name, engine), url in zip(engines.items(), urls, strict=True)
        }
        pair = Pair(engines, endpoints)
        if not await pair.wait_ready(30):
            raise EngineUnavailable(f"An engine started but does not answer; its log is in {log_dir}.")
        yield pair

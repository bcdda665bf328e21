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
from bench.registry import engine_class
from runners.client import Endpoint
from runners.engines.base import Engine

__all__ = ["Pair", "make_engines", "start_pair"]


class Pair:
    """Running engines by role, and how to call them."""

    def __init__(self, engines: Mapping[Role, Engine], endpoints: Mapping[Role, Endpoint]) -> None:
        self.engines = engines
        self.endpoints = endpoints

    async def probe(self) -> dict[str, Any]:
        """Return each engine's facts for ``run.json``; None for a role without an engine."""
        roles: tuple[Role, ...] = ("target", "small")
        return {role: await self.engines[role].probe() if role in self.engines else None for role in roles}

    async def reset_caches(self) -> dict[str, bool]:
        """Clear the prefix cache of each engine; False where an engine can't."""
        return {role: await engine.reset_cache() for role, engine in self.engines.items()}

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


def make_engines(config: PairConfig, roles: Iterable[Role]) -> dict[Role, Engine]:
    """Return the engines of ``roles``, checked and not started.

    Raises:
        UsageError: The pair has no engine for a role, or one is misconfigured.
    """
    configs: dict[Role, EngineConfig | None] = {"target": config.target, "small": config.small}
    engines: dict[Role, Engine] = {}
    for role in roles:
        one = configs[role]
        if one is None:
            raise UsageError(
                f"This profile has no {role} engine; set pair.{role} (see `reusebench run --help`)."
            )
        engines[role] = engine_class(one.kind)(one, role)
    return engines


@asynccontextmanager
async def start_pair(config: PairConfig, roles: Iterable[Role], log_dir: Path) -> AsyncIterator[Pair]:
    """Start the engines of ``roles`` side by side, and stop them at the end, whatever happens.

    Raises:
        UsageError: As :func:`make_engines`.
        ModelMissing, EngineUnavailable: An engine did not come up.
    """
    engines = make_engines(config, roles)
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
            role: Endpoint(
                url=str(url),
                model=getattr(engine, "model", None) or engine.config.model,
                api_key_env=engine.config.api_key_env if engine.config.kind == "openai" else None,
                params=engine.config.params,
                timeout_s=engine.config.timeout_s,
                tries=engine.config.tries,
            )
            for (role, engine), url in zip(engines.items(), urls, strict=True)
        }
        pair = Pair(engines, endpoints)
        if not await pair.wait_ready(30):
            raise EngineUnavailable(f"An engine started but does not answer; its log is in {log_dir}.")
        yield pair

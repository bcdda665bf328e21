"""ExactCache: an identical request gets the stored reply; anything else takes the miss path."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from bench.engine import Role
from bench.method import CacheEvent, ChatRequest, Context, Environment, Reply, StateEvent
from methods.misspath import ENTRY_FIELDS, MissPath, reply_from
from methods.pot import PoTConfig

__all__ = ["ExactCache", "request_key"]


def request_key(request: ChatRequest) -> str:
    """Return a digest of everything that can change the output.

    The model, the complete messages (roles, null contents, tool calls and results included) and every
    parameter. The order of keys means nothing; an omitted parameter is its own value, not a default.
    """
    whole = {"model": request.model, "messages": list(request.messages), "params": dict(request.params)}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class ExactCache:
    """Exact-match response cache (MiniCache, section 4.1).

    On a miss the task decides: PoT where a program is natural, Direct elsewhere. Only clean replies are
    stored: complete, not empty, not out of the reasoning channel. Identical requests that miss at the same
    time wait for one call.
    """

    class Config(PoTConfig):
        """Settings of ExactCache, with those of its miss path.

        Attributes:
            max_entries: Least recently used entries beyond this many are dropped; None keeps all.
        """

        max_entries: int | None = Field(default=None, ge=1)

    def __init__(self, config: Config, environment: Environment) -> None:
        self.config = config
        self._miss_path = MissPath(config, environment)
        self._entries: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._pending: dict[str, asyncio.Future[Reply | None]] = {}
        self._counts = {"hits": 0, "misses": 0, "coalesced": 0}

    @staticmethod
    def roles(config: Config) -> tuple[Role, ...]:
        """Return the engine of the miss path."""
        return (config.engine,)

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        """Serve the stored reply, or compute, store and return it."""
        with context.trace.stage("lookup"):
            key = request_key(request)
            entry = self._entries.get(key)
        if entry is not None:
            return self._hit(key, entry, context, "stored")
        while (pending := self._pending.get(key)) is not None:
            with context.trace.stage("wait"):
                shared = await asyncio.shield(pending)
            if shared is not None and (entry := self._entries.get(key)) is not None:
                self._counts["coalesced"] += 1
                return self._hit(key, entry, context, "coalesced")
            # The first request failed or gave nothing to store: this one asks for itself.
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._pending[key] = future
        reply: Reply | None = None
        try:
            reply = await self._miss(request, context, CacheEvent("miss", key=key, reason="no entry"))
            return reply
        finally:
            del self._pending[key]
            future.set_result(reply)

    def _hit(self, key: str, entry: Mapping[str, Any], context: Context, reason: str) -> Reply:
        self._counts["hits"] += 1
        if self.config.max_entries is not None:
            context.commit({"op": "touch", "key": key})
        return reply_from(
            entry, CacheEvent("exact", key=key, reason=reason, saved_tokens=entry["saved_tokens"])
        )

    async def _miss(self, request: ChatRequest, context: Context, cache: CacheEvent) -> Reply:
        self._counts["misses"] += 1
        reply, entry = await self._miss_path.solve(request, context, cache)
        if entry is not None:
            context.commit({"op": "put", "key": cache.key, **entry})
        return reply

    def apply(self, event: StateEvent) -> None:
        """Put or touch one entry; see :class:`bench.method.Stateful`."""
        key = event["key"]
        if event["op"] == "put":
            self._entries[key] = {name: event[name] for name in ENTRY_FIELDS}
        elif event["op"] != "touch":
            raise ValueError(f"no such change: {event['op']!r}")
        if key in self._entries:
            self._entries.move_to_end(key)
        limit = self.config.max_entries
        while limit is not None and len(self._entries) > limit:
            self._entries.popitem(last=False)

    def reset(self) -> None:
        """Forget every entry and count."""
        self._entries.clear()
        self._counts = dict.fromkeys(self._counts, 0)

    def snapshot(self) -> Iterator[StateEvent]:
        """Yield a put per entry, least recently used first."""
        for key, entry in self._entries.items():
            yield {"op": "put", "key": key, **entry}

    def stats(self) -> Mapping[str, int | float | str]:
        """Return the number of entries and the counts of hits, misses and coalesced misses."""
        return {"entries": len(self._entries), **self._counts}

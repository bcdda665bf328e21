"""The miss path that every cache shares, and what of its reply may be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.method import CacheEvent, ChatRequest, Context, Environment, Reply
from methods.direct import answer_directly
from methods.pot import PoT, PoTConfig

__all__ = ["ENTRY_FIELDS", "MissPath", "reply_from"]

ENTRY_FIELDS = ("text", "finish_reason", "tool_calls", "details", "saved_tokens")
"""Keys of a stored reply, which is JSON-serialisable."""


class MissPath:
    """Answers what a cache does not hold: by PoT where the task says so, else with one direct call."""

    def __init__(self, config: PoTConfig, environment: Environment) -> None:
        self._engine = config.engine
        self._pot = PoT(config, environment) if environment.task.miss_path == "pot" else None

    async def solve(
        self, request: ChatRequest, context: Context, cache: CacheEvent
    ) -> tuple[Reply, dict[str, Any] | None]:
        """Answer with ``cache`` as the reply's cache event.

        Returns:
            The reply, and what to store of it (:data:`ENTRY_FIELDS`). None instead where it must not be
            stored, because it is cut, empty or out of the reasoning channel; its reason then says so.

        Raises:
            EngineError, ExecutorFailed: Infrastructure failed; there is nothing to store.
        """
        if self._pot is not None:
            reply = await self._pot.solve(request, context, cache)
        else:
            reply = await answer_directly(request, context, getattr(context, self._engine), cache)
        whole = reply.finish_reason in ("stop", "tool_calls") and (reply.text.strip() or reply.tool_calls)
        if not whole or reply.details.get("from_reasoning"):
            why = "reply not stored: cut, empty or from the reasoning channel"
            reason = f"{cache.reason}; {why}" if cache.reason else why
            return replace(reply, cache=replace(cache, reason=reason)), None
        target = [call.tokens_out for call in context.trace.calls if call.engine == "target"]
        spent = [tokens for tokens in target if tokens is not None]
        return reply, {
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "tool_calls": list(reply.tool_calls),
            "details": dict(reply.details),
            "saved_tokens": sum(spent) if spent else None,
        }


def reply_from(entry: Mapping[str, Any], cache: CacheEvent) -> Reply:
    """Return the reply that an entry of :meth:`MissPath.solve` was made of, with ``cache`` as its event."""
    return Reply(
        entry["text"], cache, entry["finish_reason"], tuple(entry["tool_calls"]), dict(entry["details"])
    )

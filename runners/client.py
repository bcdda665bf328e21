"""The one instrumented client by which methods reach engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.engine import Completion, Emit, EngineCall, Purpose, Role
from bench.errors import EngineError, EngineRefused, EngineTimeout
from bench.method import Trace
from bench.samples import Message
from runners.chat import ChatResult, send_chat
from runners.recording import Recording

__all__ = ["Endpoint", "InstrumentedClient"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens and how it is called.

    Attributes:
        url: Base URL up to and including ``/v1``.
        model: Model name sent with every request; None sends none.
        api_key_env: Environment variable that holds the key; unset means no Authorization header.
        params: Fields added to every request body, under the request's own.
        timeout_s: Limit for one call, seconds, tries and waits included.
        tries: HTTP requests at most.
    """

    url: str
    model: str | None = None
    api_key_env: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    tries: int = 1

    def headers(self) -> dict[str, str]:
        """Return the Authorization header, read from the environment at the moment of the call."""
        key = os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""
        return {"Authorization": f"Bearer {key}"} if key else {}


class InstrumentedClient:
    """A chat client bound to one engine and one request's trace.

    Every call streams from the engine, whatever the client of the service asked for, so that each record
    has its first token's time.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        role: Role,
        trace: Trace,
        recording: Recording | None = None,
    ) -> None:
        self.role: Role = role
        self._recording = recording
        self._session = session
        self._endpoint = endpoint
        self._trace = trace

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        purpose: Purpose,
        params: Mapping[str, Any],
        emit: Emit | None = None,
    ) -> Completion:
        """See :meth:`bench.engine.EngineClient.chat`."""
        endpoint = self._endpoint
        body: dict[str, Any] = {**endpoint.params, **params, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if endpoint.model is not None:
            body["model"] = endpoint.model
        call = EngineCall(engine=self.role, purpose=purpose, model=endpoint.model)
        call.started_ns = time.monotonic_ns()
        self._trace.calls.append(call)
        try:
            result, thinking = await self._send(body, call, emit)
        except EngineError as error:
            call.error = {"type": error.kind, "message": str(error)}
            raise
        except asyncio.CancelledError:
            call.error = {"type": "cancelled", "message": "the request was cancelled"}
            raise
        finally:
            call.finished_ns = time.monotonic_ns()
        _fill(call, result, thinking)
        completion = _completion(result, thinking, body, call)
        if self._recording is not None:
            self._recording.add(body, completion)
        return completion

    async def _send(
        self, body: dict[str, Any], call: EngineCall, emit: Emit | None
    ) -> tuple[ChatResult, _ThinkFilter]:
        endpoint = self._endpoint
        deadline = time.monotonic() + endpoint.timeout_s
        while True:
            call.tries += 1
            thinking = _ThinkFilter(emit)
            left = deadline - time.monotonic()
            try:
                result = await send_chat(
                    self._session,
                    f"{endpoint.url}/chat/completions",
                    body,
                    headers=endpoint.headers(),
                    timeout_s=left,
                    emit=thinking.feed,
                )
                if not thinking.fed:  # the server ignored `stream` and sent one body
                    await thinking.feed(result.text)
                await thinking.flush()
                return result, thinking
            except (EngineRefused, EngineTimeout):
                raise
            except EngineError:
                wait = 0.5 * 2 ** (call.tries - 1)
                # What has reached the client can't be taken back, so there is no second try after it.
                if thinking.emitted or call.tries >= endpoint.tries or time.monotonic() + wait >= deadline:
                    raise
                await asyncio.sleep(wait)


class _ThinkFilter:
    """Keeps a leading ``<think>…</think>`` block of the answer channel out of the answer."""

    _OPEN, _CLOSE = "<think>", "</think>"

    def __init__(self, emit: Emit | None) -> None:
        self._emit = emit
        self._held = ""
        self._state = "start"
        self.fed = False
        self.emitted = False
        self.passed_ns: int | None = None
        self.thought = ""
        self.text: list[str] = []

    async def feed(self, piece: str) -> None:
        self.fed = True
        if self._state == "answer":
            await self._pass(piece)
            return
        self._held += piece
        if self._state == "start":
            lead = self._held.lstrip()
            if lead.startswith(self._OPEN):
                self._state, self._held = "thinking", lead[len(self._OPEN) :]
            elif lead and not self._OPEN.startswith(lead):
                self._state = "answer"
                await self._pass(self._take())
                return
        if self._state == "thinking" and self._CLOSE in self._held:
            self.thought, _, rest = self._held.partition(self._CLOSE)
            self._held = rest.lstrip()
            self._state = "after"
        if self._state == "after" and self._held.strip():
            self._state = "answer"
            await self._pass(self._take().lstrip())

    async def flush(self) -> None:
        """The stream is over: what was held is an answer after all, or an unfinished thought."""
        if self._state == "start" and self._held:
            await self._pass(self._take())
        elif self._state == "thinking":
            self.thought = self._take()

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held

    async def _pass(self, piece: str) -> None:
        if self.passed_ns is None:
            self.passed_ns = time.monotonic_ns()
        self.text.append(piece)
        if self._emit is not None:
            self.emitted = True
            await self._emit(piece)


def _fill(call: EngineCall, result: ChatResult, thinking: _ThinkFilter) -> None:
    usage = result.usage or {}
    call.model = result.model or call.model
    call.first_token_ns = result.first_token_ns
    # A thought in the answer channel is content to HTTP, but no answer yet.
    call.first_content_ns = result.first_content_ns
    if thinking.thought and result.first_content_ns is not None and not result.tool_calls:
        call.first_content_ns = thinking.passed_ns
    call.tokens_in = usage.get("prompt_tokens")
    call.tokens_out = usage.get("completion_tokens")
    call.tokens_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    call.finish_reason = result.finish_reason
    timings = result.extra.get("timings")
    if isinstance(timings, dict):
        if "prompt_ms" in timings:
            call.prefill_ns = round(timings["prompt_ms"] * 1e6)
        if "predicted_ms" in timings:
            call.decode_ns = round(timings["predicted_ms"] * 1e6)
        # llama.cpp names these only where a drafter was at work.
        call.tokens_drafted = timings.get("draft_n")
        call.tokens_accepted = timings.get("draft_n_accepted")


def _completion(
    result: ChatResult, thinking: _ThinkFilter, body: Mapping[str, Any], call: EngineCall
) -> Completion:
    text = "".join(thinking.text)
    reasoning = result.reasoning or thinking.thought
    # With thinking off, some reasoning parsers put the whole answer into the reasoning channel. Where nobody
    # said that it is off, that channel holds reasoning, which is never an answer.
    thinking_off = (body.get("chat_template_kwargs") or {}).get("enable_thinking") is False
    empty = not text.strip() and not result.tool_calls
    misplaced = thinking_off and empty and bool(result.reasoning.strip())
    return Completion(
        text=result.reasoning if misplaced else text,
        finish_reason=result.finish_reason,
        call=call,
        reasoning="" if misplaced else reasoning,
        from_reasoning=misplaced,
        tool_calls=tuple(result.tool_calls),
    )

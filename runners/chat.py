"""One chat-completions request over HTTP, streamed or not, timed at its first token and first content.

Used on both sides of a service: the runner drives services with it, and services reach engines with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.engine import Emit
from bench.errors import EngineError, EngineRefused, EngineTimeout, StreamBroken

__all__ = ["ChatResult", "open_session", "send_chat"]

_RETRIABLE_4XX = frozenset({408, 409, 425, 429})
_LINGER_S = 0.1  # a server has this long to end its stream after [DONE]; then its connection is dropped


@dataclass(slots=True)
class ChatResult:
    """A complete chat completion. Times are monotonic nanoseconds; None where the event never came.

    Attributes:
        text, reasoning: The two channels' texts; ``""`` where nothing came.
        finish_reason: As sent; ``"stop"`` where a stream brought text, ended with ``[DONE]`` and named none.
        tool_calls: In the OpenAI shape, argument fragments joined.
        usage: As sent, or None.
        extra: Other top-level fields of the body or of the chunks (``timings``, ``reusebench``, …).
    """

    started_ns: int
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    model: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    first_token_ns: int | None = None
    first_content_ns: int | None = None
    finished_ns: int | None = None


def open_session(*, reuse: bool = True) -> aiohttp.ClientSession:
    """Return a session with no hidden limits: no pool cap, no default time-out, no proxy from elsewhere.

    Args:
        reuse: Keep connections open between requests. False for servers that may close a connection just
            when it is used again (llama.cpp does so after a stream): that request would fail, and a POST
            can't be repeated unseen. A new connection costs well under a millisecond.
    """
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        if reuse
        else aiohttp.TCPConnector(limit=0, force_close=True)
    )
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def send_chat(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    emit: Emit | None = None,
) -> ChatResult:
    """POST ``body`` to ``url`` once and return the completion; a partial one is never returned.

    Args:
        session: From :func:`open_session`.
        url: The full URL of the chat-completions endpoint.
        body: The request; ``stream`` in it decides how the reply is read.
        headers: Further HTTP headers.
        timeout_s: Limit for the whole exchange, seconds.
        emit: Receives answer text as it arrives (streams only).

    Raises:
        EngineTimeout: The limit passed.
        EngineRefused: 4xx; the message is the server's own.
        StreamBroken: The stream broke off, brought nothing, or carried an error object.
        EngineError: No connection, 408/409/425/429, 5xx, or a body that is no completion.
    """
    result = ChatResult(started_ns=time.monotonic_ns())
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(
                url, data=json.dumps(body), headers={"Content-Type": "application/json", **(headers or {})}
            ) as reply,
        ):
            if reply.status != 200:
                raise _http_error(reply.status, await reply.text(errors="replace"))
            if reply.content_type == "text/event-stream":
                await _read_stream(reply, result, emit)
            else:
                _read_body(await reply.read(), result)
    except TimeoutError as error:
        raise EngineTimeout(f"no complete reply within {timeout_s:g} s") from error
    except aiohttp.ClientPayloadError as error:
        raise StreamBroken(f"the connection closed before the reply was complete ({error})") from error
    except aiohttp.ClientError as error:
        raise EngineError(f"no usable connection to the server: {error}", kind="connection") from error
    result.finished_ns = result.finished_ns or time.monotonic_ns()
    return result


def _http_error(status: int, text: str) -> EngineError:
    message = text.strip()[:500] or "(empty body)"
    body: dict[str, Any] = {}
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None  # a proxy's page, say; the raw text is all there is to tell
    if isinstance(parsed, dict):
        body = parsed
        error = body.get("error")
        message = str((error.get("message") if isinstance(error, dict) else error) or message)
    if 400 <= status < 500 and status not in _RETRIABLE_4XX:
        return EngineRefused(f"HTTP {status}: {message}", status=status, body=body)
    return EngineError(f"HTTP {status}: {message}", status=status, kind=f"http_{status}", body=body)


def _read_body(raw: bytes, result: ChatResult) -> None:
    try:
        body = json.loads(raw)
        if isinstance(body, dict) and body.get("error"):
            raise _reported_error(body, "in the reply")
        choice = body["choices"][0]
        message = dict(choice["message"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"the reply is no chat completion: {raw[:200]!r}", kind="bad_reply") from error
    _note_top_level(body, result)
    result.text = message.get("content") or ""
    result.reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    result.tool_calls = list(message.get("tool_calls") or [])
    result.finish_reason = choice.get("finish_reason") or ""
    if not result.finish_reason:
        raise StreamBroken("the reply has no finish_reason")


async def _read_stream(reply: aiohttp.ClientResponse, result: ChatResult, emit: Emit | None) -> None:
    pieces: list[str] = []
    thoughts: list[str] = []
    done = False
    async for data in _events(reply.content):
        if data == b"[DONE]":
            done = True
            break
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise StreamBroken(f"a chunk of the stream is no JSON: {data[:200]!r}") from error
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise _reported_error(chunk, "inside the stream")
        _note_top_level(chunk, result)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            content = delta.get("content")
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            calls = delta.get("tool_calls")
            if content or thought or calls:
                now = time.monotonic_ns()
                result.first_token_ns = result.first_token_ns or now
                if content or calls:
                    result.first_content_ns = result.first_content_ns or now
            if thought:
                thoughts.append(thought)
            if calls:
                _merge_tool_calls(result.tool_calls, calls)
            if choice.get("finish_reason"):
                result.finish_reason = choice["finish_reason"]
            if content:
                pieces.append(content)
                if emit is not None:
                    await emit(content)
    if not result.finish_reason:
        if not done:
            raise StreamBroken("the stream ended without a finish reason")
        if result.first_token_ns is None:
            raise StreamBroken("the stream ended without a token and without a finish reason")
        result.finish_reason = "stop"
    if done:
        # The reply is whole. Only a connection read to its end can be used again.
        result.finished_ns = time.monotonic_ns()
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_LINGER_S):
                await reply.read()
    result.text = "".join(pieces)
    result.reasoning = "".join(thoughts)


def _reported_error(chunk: Any, where: str) -> StreamBroken:
    body = chunk if isinstance(chunk, dict) else {}
    error = body.get("error", chunk)
    message, kind = (
        (error.get("message"), error.get("type")) if isinstance(error, dict) else (repr(error), None)
    )
    return StreamBroken(f"the server sent an error {where}: {message}", kind=kind, body=body)


def _note_top_level(body: Mapping[str, Any], result: ChatResult) -> None:
    for key, value in body.items():
        if key == "usage":
            result.usage = value or result.usage
        elif key == "model":
            result.model = value
        elif key not in ("choices", "id", "object", "created"):
            result.extra[key] = value


def _merge_tool_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        index = delta.get("index", 0)
        while len(calls) <= index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call["id"] = delta.get("id") or call["id"]
        function = delta.get("function") or {}
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event; comments and other fields are skipped."""
    rest = b""
    data: list[bytes] = []
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip())
    if data:
        yield b"\n".join(data)

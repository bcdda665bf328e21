"""The OpenAI chat-completions shapes that a service reads and writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.errors import EngineError, EngineRefused, EngineTimeout, ReuseBenchError, UsageError
from bench.method import ChatRequest, Reply, Trace

__all__ = [
    "BadRequest",
    "Options",
    "Streamed",
    "completion_body",
    "cut_at_stop",
    "error_body",
    "parse_request",
    "usage_of",
]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class BadRequest(Exception):
    """A request that is refused; :meth:`body` is the OpenAI error shape."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status

    def body(self) -> dict[str, Any]:
        """Return the error as the OpenAI API shapes it."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


@dataclass(frozen=True, slots=True)
class Options:
    """Fields that change the transport, or that the service itself honours."""

    stream: bool
    include_usage: bool
    stop: tuple[str, ...]


def parse_request(body: Mapping[str, Any], default_model: str) -> tuple[ChatRequest, Options]:
    """Check a request body and split it into what a method sees and how the reply travels.

    Unknown fields are passed on to the method. ``max_completion_tokens`` becomes ``max_tokens``.

    Raises:
        BadRequest: A field is missing, of a wrong type, or asks for what no service here can give.
    """
    params = {
        key: value
        for key, value in body.items()
        if key not in ("model", "messages", "stream", "stream_options")
    }
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("`messages` must be a non-empty list", param="messages")
    for position, message in enumerate(messages):
        _check_message(message, position)
    model = body.get("model", default_model)
    if not isinstance(model, str):
        raise BadRequest("`model` must be a string", param="model")
    if (count := params.pop("n", None)) not in (None, 1) or isinstance(count, bool):
        raise BadRequest("`n` other than 1 is not supported: a reply is one answer", param="n")
    for name in ("logprobs", "top_logprobs"):
        if params.get(name):
            raise BadRequest(f"`{name}` is not supported: a reused answer has none", param=name)
    if (limit := params.pop("max_completion_tokens", None)) is not None:
        params["max_tokens"] = limit
    if (limit := params.get("max_tokens")) is not None and not (_is_int(limit) and limit >= 1):
        raise BadRequest("`max_tokens` must be a positive integer", param="max_tokens")
    temperature = params.get("temperature")
    if temperature is not None and not (_is_number(temperature) and 0 <= temperature <= 2):
        raise BadRequest("`temperature` must be a number between 0 and 2", param="temperature")
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise BadRequest("`stream` must be true or false", param="stream")
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict) or (stream_options and not stream):
        raise BadRequest("`stream_options` is an object, and goes with stream: true", param="stream_options")
    options = Options(stream, bool(stream_options.get("include_usage")), _stop(params.get("stop")))
    return ChatRequest(model, tuple(messages), params), options


def _check_message(message: Any, position: int) -> None:
    param = f"messages[{position}]"
    if not isinstance(message, dict):
        raise BadRequest(f"`{param}` must be an object", param=param)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"`{param}.role` must be one of {', '.join(sorted(_ROLES))}", param=f"{param}.role")
    content = message.get("content")
    if isinstance(content, list):
        fine = all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    else:
        # Null is what an assistant message beside tool calls has; elsewhere it is a missing text.
        fine = isinstance(content, str) or (content is None and role == "assistant")
    if not fine:
        raise BadRequest(f"`{param}.content` must be a string or a list of parts", param=f"{param}.content")


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise BadRequest("`stop` must be a string or a list of non-empty strings", param="stop")
    return tuple(stops)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Return ``text`` up to the first stop string in it.

    Engines stop by themselves; this honours ``stop`` where the answer was computed or cached.
    """
    cut = min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))
    return text[:cut]


def usage_of(trace: Trace) -> dict[str, Any] | None:
    """Return what the engines really spent on this request, in tokens: all zero for a hit.

    The sums are over the calls that completed; None where one of them came without its counts. The
    prefix-cached share is given where every call tells it.
    """
    calls = [call for call in trace.calls if call.error is None]
    prompt = _total([call.tokens_in for call in calls])
    completion = _total([call.tokens_out for call in calls])
    if prompt is None or completion is None:
        return None
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    cached = _total([call.tokens_cached for call in calls])
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def completion_body(
    request_id: str,
    model: str,
    reply: Reply,
    usage: dict[str, Any] | None,
    stop: tuple[str, ...],
    extension: dict[str, Any],
) -> dict[str, Any]:
    """Return the body of a non-streamed reply."""
    text = cut_at_stop(reply.text, stop)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reply.tool_calls:
        message |= {"content": text or None, "tool_calls": list(reply.tool_calls)}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
        "reusebench": extension,
    }


def error_body(error: BaseException) -> dict[str, Any]:
    """Return a failure in the OpenAI error shape; of a bug in a method only its type is told."""
    if isinstance(error, EngineTimeout):
        kind = "timeout"
    elif isinstance(error, EngineRefused | UsageError):
        kind = "invalid_request_error"
    else:
        kind = "engine_error" if isinstance(error, EngineError) else "server_error"
    code = error.kind if isinstance(error, EngineError) else type(error).__name__
    message = str(error) if isinstance(error, ReuseBenchError) else "internal error; the service's log has it"
    return {"error": {"message": message or code, "type": kind, "param": None, "code": code}}


class Streamed:
    """Writes one reply as server-sent chunks."""

    def __init__(self, request_id: str, model: str, include_usage: bool, stop: tuple[str, ...]) -> None:
        self._frame = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._stop = stop
        self._sent = 0

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _event({**self._frame, "choices": [choice], **more})

    def role(self) -> str:
        """Return the first chunk."""
        return self._chunk({"role": "assistant", "content": ""})

    def content(self, piece: str) -> str:
        """Return a chunk of answer text; ``""`` where there is none to send."""
        self._sent += len(piece)
        return self._chunk({"content": piece}) if piece else ""

    def error(self, body: dict[str, Any]) -> str:
        """Return the chunk that ends a stream whose request failed halfway."""
        return _event(body)

    def finish(self, reply: Reply, usage: dict[str, Any] | None, extension: dict[str, Any]) -> Iterator[str]:
        """Yield what is left of the reply, its end, and the usage where it was asked for."""
        rest = cut_at_stop(reply.text, self._stop)[self._sent :]
        if rest:
            yield self.content(rest)
        if reply.tool_calls:
            calls = [{"index": index, **call} for index, call in enumerate(reply.tool_calls)]
            yield self._chunk({"tool_calls": calls})
        yield self._chunk({}, reply.finish_reason, reusebench=extension)
        if self._include_usage:
            yield _event({**self._frame, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(payload: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"

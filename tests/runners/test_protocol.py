from __future__ import annotations

import json
from typing import Any

import pytest

from bench.engine import EngineCall
from bench.errors import EngineError, EngineTimeout, UsageError
from bench.method import CacheEvent, Reply, Trace
from runners.protocol import (
    BadRequest,
    Streamed,
    completion_body,
    cut_at_stop,
    error_body,
    parse_request,
    usage_of,
)
from tests.serving import Answer, ask

NONE = CacheEvent("none")
CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": "{}"}}


def test_a_request_is_split_into_what_matters_and_how_it_travels() -> None:
    body = ask("hi", stream=True, stream_options={"include_usage": True}, stop="\n", seed=3, own={"x": 1})
    request, options = parse_request({**body, "max_completion_tokens": 5, "max_tokens": 9, "n": 1}, "d")
    assert request.model == "m"
    assert list(request.messages) == body["messages"]
    assert dict(request.params) == {"stop": "\n", "seed": 3, "own": {"x": 1}, "max_tokens": 5}
    assert (options.stream, options.include_usage, options.stop) == (True, True, ("\n",))
    request, options = parse_request({"messages": body["messages"]}, "d")
    assert (request.model, dict(request.params)) == ("d", {})
    assert (options.stream, options.include_usage, options.stop) == (False, False, ())


def test_an_omitted_temperature_stays_omitted() -> None:
    assert "temperature" not in parse_request(ask(), "d")[0].params
    assert parse_request(ask(temperature=0), "d")[0].params["temperature"] == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content"),
        ({"model": 5}, "model"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": [1]}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request({**ask(), **change}, "d")
    error = caught.value.body()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], caught.value.status) == ("invalid_request_error", param, 400)
    assert f"`{param}" in error["message"]


@pytest.mark.parametrize(
    "harmless", [{"n": 1}, {"n": None}, {"logprobs": False}, {"temperature": None}, {"stop": None}]
)
def test_defaults_may_be_spelt_out(harmless: dict[str, Any]) -> None:
    parse_request({**ask(), **harmless}, "d")


def test_assistant_history_with_null_content_is_kept_as_it_is() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "price?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "12.5"},
    ]
    assert list(parse_request({"messages": messages}, "d")[0].messages) == messages


@pytest.mark.parametrize(
    ("stop", "left"), [((), "a\nb END c"), (("\n",), "a"), (("END", "b"), "a\n"), (("zz",), "a\nb END c")]
)
def test_text_ends_at_the_first_stop(stop: tuple[str, ...], left: str) -> None:
    assert cut_at_stop("a\nb END c", stop) == left


def call(**fields: Any) -> EngineCall:
    return EngineCall("target", "answer", **fields)


def test_usage_is_what_was_spent_and_unknown_where_it_is_not_told() -> None:
    first = call(tokens_in=9, tokens_out=4, tokens_cached=2)
    second = call(tokens_in=1, tokens_out=2, tokens_cached=0)
    failed = call(error={"type": "x", "message": "y"})
    spent = usage_of(Trace(0, calls=[first, failed, second]))
    assert spent == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    hit = usage_of(Trace(0))
    assert (
        hit is not None and (hit["prompt_tokens"], hit["completion_tokens"], hit["total_tokens"]) == (0,) * 3
    )
    some = usage_of(Trace(0, calls=[first, call(tokens_in=1, tokens_out=1)]))
    assert some is not None and "prompt_tokens_details" not in some
    assert usage_of(Trace(0, calls=[first, call()])) is None


def streamed(
    reply: Reply, pieces: tuple[str, ...] = (), *, usage: bool = False, stop: tuple[str, ...] = ()
) -> Answer:
    writer = Streamed("r1", "m", usage, stop)
    raw = [writer.role(), *(writer.content(piece) for piece in pieces)]
    raw += writer.finish(reply, {"total_tokens": 3}, {"cache": {}})
    return Answer(200, "".join(raw), {"content-type": "text/event-stream"})


def test_a_stream_sends_what_was_not_yet_sent() -> None:
    reply = Reply("caf\u00e9 \ud83d 42", NONE)
    for pieces in ((), ("caf",), ("caf\u00e9 ", "", "\ud83d 42")):
        answer = streamed(reply, pieces)
        assert answer.text == reply.text
        assert answer.finish == "stop" and answer.events[-1] == "[DONE]"
        assert all(event["choices"][0]["index"] == 0 for event in answer.events[:-1])
    assert streamed(Reply("a\nb", NONE), stop=("\n",)).text == "a"
    assert streamed(Reply("", NONE)).text == ""


def test_the_usage_chunk_comes_only_when_asked_for_and_without_choices() -> None:
    answer = streamed(Reply("x", NONE), usage=True)
    assert answer.events[-2]["choices"] == [] and answer.events[-2]["usage"] == {"total_tokens": 3}
    assert all("usage" not in event for event in answer.events[:-2])
    assert all("usage" not in event for event in streamed(Reply("x", NONE)).events[:-1])


def test_tool_calls_travel_both_ways() -> None:
    reply = Reply("", NONE, "tool_calls", (CALL,))
    assert streamed(reply).events[1]["choices"][0]["delta"] == {"tool_calls": [{"index": 0, **CALL}]}
    message = completion_body("r", "m", reply, None, (), {})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    both = completion_body("r", "m", Reply("a\nb", NONE, "tool_calls", (CALL,)), None, ("\n",), {})
    assert both["choices"][0]["message"]["content"] == "a"


def test_errors_keep_what_they_mean_and_bugs_keep_their_secrets() -> None:
    def fields(error: Exception) -> tuple[str, str, str]:
        body = error_body(error)["error"]
        assert set(body) == {"message", "type", "param", "code"}
        return body["message"], body["type"], body["code"]

    assert fields(EngineTimeout("late")) == ("late", "timeout", "timeout")
    assert fields(EngineError("bad", kind="http_500")) == ("bad", "engine_error", "http_500")
    assert fields(UsageError("no")) == ("no", "invalid_request_error", "UsageError")
    message, kind, code = fields(KeyError("secret"))
    assert "secret" not in message and (kind, code) == ("server_error", "KeyError")
    json.dumps(error_body(EngineError("")))

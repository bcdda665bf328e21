from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from bench.engine import Completion
from bench.errors import EngineError, EngineRefused, EngineTimeout, StreamBroken
from bench.method import Trace
from runners.chat import open_session
from runners.client import Endpoint, InstrumentedClient
from tests.serving import (
    END,
    STREAM_HEAD,
    USER,
    RawServer,
    answers,
    chunk,
    delta,
    sse,
    streams,
    until,
)

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 6},
}
Call = Callable[..., Any]


class Caller:
    """A client whose trace and emitted pieces can be looked at."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.trace = Trace(received_ns=0)
        self.pieces: list[str] = []

    async def emit(self, piece: str) -> None:
        self.pieces.append(piece)

    async def __call__(self, server: RawServer, sent: Any = None, /, **endpoint: Any) -> Completion:
        client = InstrumentedClient(self.session, Endpoint(server.url, **endpoint), "target", self.trace)
        return await client.chat([USER], purpose="answer", params=sent or {}, emit=self.emit)

    @property
    def last(self) -> Any:
        return self.trace.calls[-1]


@pytest.fixture
async def call() -> AsyncIterator[Caller]:
    async with open_session() as session:
        yield Caller(session)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits before a retry, shortened, as they were asked for."""
    asked: list[float] = []
    sleep = asyncio.sleep

    async def short(seconds: float) -> None:
        asked.append(seconds)
        await sleep(0.02)

    monkeypatch.setattr("runners.client.asyncio.sleep", short)
    return asked


def whole(text: str, finish: str = "stop") -> bytes:
    payloads = (delta(content=text), delta(finish), {"choices": [], "usage": USAGE}, "[DONE]")
    return STREAM_HEAD + chunk(sse(*payloads)) + END


def error(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nno".encode()


def in_turn(*replies: bytes) -> RawServer:
    """A server with one reply per request; after a reply that is cut it hangs up."""
    left = list(replies)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        reply = left.pop(0)
        writer.write(reply)
        if not reply or (reply.startswith(STREAM_HEAD) and not reply.endswith(END)):
            writer.close()

    return RawServer(answer)


CUT = STREAM_HEAD + chunk(sse(delta(content="The tot")))


async def test_a_call_is_recorded_with_all_that_the_engine_tells(call: Caller) -> None:
    timings = {"prompt_ms": 1.5, "predicted_ms": 20}
    async with streams(
        {**delta(content="42"), "model": "big"},
        delta("stop"),
        {"choices": [], "usage": USAGE, "timings": timings},
        "[DONE]",
    ) as server:
        completion = await call(server, {"temperature": 0}, model="asked", params={"top_k": 1})
    assert (completion.text, completion.finish_reason, completion.from_reasoning) == ("42", "stop", False)
    one = completion.call
    assert one is call.last and len(call.trace.calls) == 1
    assert (one.engine, one.purpose, one.model, one.tries, one.error) == ("target", "answer", "big", 1, None)
    assert (one.tokens_in, one.tokens_cached, one.tokens_out) == (9, 6, 4)
    assert (one.prefill_ns, one.decode_ns, one.finish_reason) == (1_500_000, 20_000_000, "stop")
    assert one.started_ns <= one.first_token_ns <= one.first_content_ns <= one.finished_ns
    assert server.bodies == [
        {
            "top_k": 1,
            "temperature": 0,
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "model": "asked",
        }
    ]


async def test_the_request_goes_before_the_endpoint_but_never_redirects_it(call: Caller) -> None:
    async with in_turn(whole("x")) as server:
        await call(server, {"top_k": 2, "model": "mine", "stream": False}, params={"top_k": 1}, model="own")
    sent = server.bodies[0]
    assert (sent["top_k"], sent["model"], sent["stream"]) == (2, "own", True)


async def test_what_the_engine_does_not_tell_stays_unknown(call: Caller) -> None:
    async with streams(delta("stop", content="42"), "[DONE]") as server:
        await call(server)
    one = call.last
    assert (one.tokens_in, one.tokens_cached, one.tokens_out, one.prefill_ns) == (None,) * 4


async def test_by_default_nothing_is_tried_twice(call: Caller) -> None:
    for reply, kind in ((error("429 Slow"), "http_429"), (error("500 Bad"), "http_500"), (b"", "connection")):
        async with in_turn(reply) as server:
            with pytest.raises(EngineError):
                await call(server)
            assert len(server.bodies) == 1
        assert (call.last.tries, call.last.error["type"], call.last.finish_reason) == (1, kind, None)
        assert call.last.finished_ns >= call.last.started_ns


async def test_each_try_is_counted_and_the_waits_are_part_of_the_call(
    call: Caller, waits: list[float]
) -> None:
    async with in_turn(error("429 Slow"), error("503 Bad"), b"", whole("42")) as server:
        completion = await call(server, tries=5)
        assert len(server.bodies) == 4
    assert completion.text == "42" and call.pieces == ["42"]
    assert len(call.trace.calls) == 1
    assert (call.last.tries, call.last.error) == (4, None)
    assert waits == [0.5, 1.0, 2.0]
    assert call.last.finished_ns - call.last.started_ns >= 3 * 20_000_000


async def test_the_last_try_gives_its_own_error(call: Caller, waits: list[float]) -> None:
    async with in_turn(error("429 Slow"), error("503 Bad")) as server:
        with pytest.raises(EngineError, match="503"):
            await call(server, tries=2)
    assert (call.last.tries, call.last.error["type"]) == (2, "http_503")


async def test_a_refusal_is_final(call: Caller, waits: list[float]) -> None:
    async with in_turn(error("400 No")) as server:
        with pytest.raises(EngineRefused):
            await call(server, tries=3)
    assert (call.last.tries, call.last.error["type"], waits) == (1, "refused", [])


async def test_what_has_reached_the_client_is_not_tried_again(call: Caller, waits: list[float]) -> None:
    async with in_turn(CUT, whole("never")) as server:
        with pytest.raises(StreamBroken):
            await call(server, tries=3)
        assert len(server.bodies) == 1
    assert call.pieces == ["The tot"] and call.last.error["type"] == "truncated_stream"


async def test_a_broken_thought_is_tried_again(call: Caller, waits: list[float]) -> None:
    thought = STREAM_HEAD + chunk(sse(delta(content="<think>hm")))
    async with in_turn(thought, whole("42")) as server:
        assert (await call(server, tries=2)).text == "42"
    assert call.pieces == ["42"] and call.last.tries == 2


async def test_the_limit_covers_tries_and_waits(call: Caller) -> None:
    async with in_turn(error("500 Bad"), whole("late")) as server:
        with pytest.raises(EngineError, match="500"):
            await call(server, tries=5, timeout_s=0.4)  # the first wait alone is longer
        assert len(server.bodies) == 1


async def test_a_long_limit_is_the_limit_that_is_used(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []

    async def send(*_: Any, timeout_s: float, **__: Any) -> Any:
        used.append(timeout_s)
        raise EngineTimeout("as if")

    monkeypatch.setattr("runners.client.send_chat", send)
    async with answers({}) as server:
        with pytest.raises(EngineTimeout):
            await call(server, timeout_s=3600, tries=3)
    assert used == [pytest.approx(3600, abs=1)] and call.last.error["type"] == "timeout"


async def test_a_cancelled_call_says_so(call: Caller) -> None:
    async def never(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with RawServer(never) as server:
        task = asyncio.create_task(call(server))
        await until(lambda: server.bodies)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert call.last.error["type"] == "cancelled" and call.last.finished_ns is not None


def split(text: str, size: int) -> list[Any]:
    return [delta(content=text[at : at + size]) for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize(
    ("sent", "text", "thought"),
    [
        ("<think>so\n2 < 3</think>\n\n42 is it", "42 is it", "so\n2 < 3"),
        ("<think>\n\n</think>\n\n42", "42", "\n\n"),
        ("\n <think>a</think>42", "42", "a"),
        ("<think></think>", "", ""),
        ("<think>a</think>\n\n", "", "a"),
        ("<think>never closed </thin", "", "never closed </thin"),
        ("<thin ice", "<thin ice", ""),
        ("<thi", "<thi", ""),
        ("  42 <think>x</think>", "  42 <think>x</think>", ""),
        ("<think>a</think> 1 </think> 2", "1 </think> 2", "a"),
        ("  ", "  ", ""),
    ],
)
async def test_a_thought_before_the_answer_is_kept_out_of_it(
    call: Caller, size: int, sent: str, text: str, thought: str
) -> None:
    async with streams(*split(sent, size), delta("stop"), "[DONE]") as server:
        completion = await call(server)
    assert completion.text == text == "".join(call.pieces)
    assert completion.reasoning == thought
    assert not completion.from_reasoning


async def test_a_thought_is_no_first_content(call: Caller) -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(sse(delta(content="<think>hm"))))
        await writer.drain()
        await asyncio.sleep(0.03)
        writer.write(chunk(sse(delta(content="</think>42"), delta("stop"), "[DONE]")) + END)

    async with RawServer(answer) as server:
        await call(server)
    assert call.last.first_content_ns - call.last.first_token_ns > 20_000_000
    async with streams(delta(content="<think>hm"), delta("length"), "[DONE]") as server:
        await call(server)
    assert call.last.first_token_ns is not None and call.last.first_content_ns is None


async def test_a_server_that_does_not_stream_is_read_too(call: Caller) -> None:
    message = {"role": "assistant", "content": "<think>a</think>42"}
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE}
    async with answers(body) as server:
        completion = await call(server)
    assert (completion.text, completion.reasoning, call.pieces) == ("42", "a", ["42"])
    assert (call.last.first_token_ns, call.last.first_content_ns, call.last.tokens_out) == (None, None, 4)


@pytest.mark.parametrize("content", [None, "", "\n"])
async def test_an_answer_in_the_reasoning_channel_is_taken_and_flagged(call: Caller, content: Any) -> None:
    said = delta(reasoning_content="The answer is 9.8", **({} if content is None else {"content": content}))
    async with streams(said, delta("stop"), "[DONE]") as server:
        completion = await call(server, {"chat_template_kwargs": {"enable_thinking": False}})
    assert (completion.text, completion.from_reasoning) == ("The answer is 9.8", True)
    assert completion.reasoning == ""


@pytest.mark.parametrize("on", [{}, {"chat_template_kwargs": {"enable_thinking": True}}])
async def test_unless_thinking_is_off_reasoning_is_no_answer(call: Caller, on: dict[str, Any]) -> None:
    async with streams(delta(reasoning_content="hm"), delta("stop"), "[DONE]") as server:
        completion = await call(server, on)
    assert (completion.text, completion.reasoning, completion.from_reasoning) == ("", "hm", False)


async def test_reasoning_beside_an_answer_or_a_tool_call_stays_apart(call: Caller) -> None:
    tool = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]
    for fields in ({"content": "42"}, {"tool_calls": tool}):
        async with streams(delta(reasoning_content="hm"), delta("stop", **fields), "[DONE]") as server:
            completion = await call(server)
        assert (completion.text, completion.reasoning) == (fields.get("content", ""), "hm")
        assert not completion.from_reasoning and len(completion.tool_calls) == ("tool_calls" in fields)


async def test_the_key_is_read_when_it_is_needed(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_turn(whole("x"), whole("x"), whole("x")) as server:
        monkeypatch.delenv("SOME_KEY", raising=False)
        await call(server, api_key_env="SOME_KEY")
        monkeypatch.setenv("SOME_KEY", "k-123")
        await call(server, api_key_env="SOME_KEY")
        await call(server)
    assert ["Bearer k-123" in head for head in server.headers] == [False, True, False]
    assert "k-123" not in repr(Endpoint(server.url, api_key_env="SOME_KEY")) + repr(call.trace)

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bench.errors import EngineError, EngineRefused, EngineTimeout, StreamBroken
from runners.chat import ChatResult, open_session, send_chat
from tests.serving import END, STREAM_HEAD, RawServer, answers, ask, chunk, delta, serving, sse, streams

USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
ROLE = delta(role="assistant", content="")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as opened:
        yield opened


async def send(session: aiohttp.ClientSession, server: RawServer, **more: Any) -> ChatResult:
    more.setdefault("timeout_s", 10)
    return await send_chat(session, f"{server.url}/chat/completions", ask(stream=True), **more)


async def test_the_usage_chunk_has_no_choices(session: aiohttp.ClientSession) -> None:
    async with streams(
        delta("stop", content="42"), {"choices": [], "usage": USAGE, "timings": {"prompt_ms": 1}}, "[DONE]"
    ) as server:
        result = await send(session, server)
    assert (result.text, result.usage, result.finish_reason) == ("42", USAGE, "stop")
    assert result.extra == {"timings": {"prompt_ms": 1}}


async def test_usage_beside_a_choice_and_then_null_is_kept(session: aiohttp.ClientSession) -> None:
    async with streams(
        {**delta(content="42"), "usage": USAGE}, {**delta("stop"), "usage": None}, "[DONE]"
    ) as server:
        assert (await send(session, server)).usage == USAGE


async def test_first_token_and_first_content_are_what_they_say(session: aiohttp.ClientSession) -> None:
    """The server sends each delta only when the client has the one before it: the times must interleave."""
    sent: dict[str, int] = {}
    heard = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        import time

        writer.write(STREAM_HEAD)
        for name, payload in (
            ("role", ROLE),
            ("reasoning", delta(reasoning_content="Ok")),
            ("content", delta(content="42")),
            ("end", delta("stop")),
        ):
            sent[name] = time.monotonic_ns()
            writer.write(chunk(sse(payload)))
            await writer.drain()
            if name == "content":
                await heard.wait()
            else:
                await asyncio.sleep(0.03)
        writer.write(chunk(sse("[DONE]")) + END)

    async def emit(piece: str) -> None:
        assert piece == "42"
        heard.set()

    async with RawServer(answer) as server:
        result = await send(session, server, emit=emit)
    assert result.first_token_ns is not None and result.first_content_ns is not None
    assert sent["reasoning"] < result.first_token_ns < sent["content"]
    assert sent["content"] < result.first_content_ns < sent["end"]
    assert result.started_ns < sent["role"] and result.finished_ns is not None
    assert (result.text, result.reasoning) == ("42", "Ok")


@pytest.mark.parametrize("payloads", [[ROLE, "[DONE]"], ["[DONE]"], [ROLE]])
async def test_a_stream_without_a_token_has_failed(
    session: aiohttp.ClientSession, payloads: list[Any]
) -> None:
    async with streams(*payloads) as server:
        with pytest.raises(StreamBroken):
            await send(session, server)


async def test_an_empty_reply_that_was_finished_has_no_first_token(session: aiohttp.ClientSession) -> None:
    async with streams(ROLE, delta("stop"), "[DONE]") as server:
        result = await send(session, server)
    assert (result.text, result.first_token_ns, result.first_content_ns) == ("", None, None)


async def test_null_content_beside_reasoning(session: aiohttp.ClientSession) -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "The answer is 9.8"}
    async with answers({"choices": [{"message": message, "finish_reason": "stop"}]}) as server:
        result = await send(session, server)
    assert (result.text, result.reasoning) == ("", "The answer is 9.8")


async def test_a_finish_reason_or_done_makes_a_reply_whole(session: aiohttp.ClientSession) -> None:
    async with streams(delta("length", content="x")) as server:
        assert (await send(session, server)).finish_reason == "length"
    async with streams(delta(content="x"), "[DONE]") as server:
        assert (await send(session, server)).finish_reason == "stop"
    async with streams(delta(content="x"), "[DONE]", end=b"") as server:  # closed early, but after the end
        assert (await send(session, server)).text == "x"


async def test_a_stream_that_dies_halfway_has_failed(session: aiohttp.ClientSession) -> None:
    for end in (b"", END):
        async with streams(delta(content="The tot"), end=end) as server:
            with pytest.raises(StreamBroken) as caught:
                await send(session, server)
        assert caught.value.kind == "truncated_stream"


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        ({"message": "out of memory", "type": "server_error"}, "out of memory", "server_error"),
        ("out of memory", "out of memory", "truncated_stream"),
    ],
)
async def test_an_error_object_after_200_is_a_failure(
    session: aiohttp.ClientSession, error: Any, message: str, kind: str
) -> None:
    got: list[str] = []

    async def emit(piece: str) -> None:
        got.append(piece)

    async with streams(delta(content="The"), {"error": error}, "[DONE]") as server:
        with pytest.raises(StreamBroken, match=message) as caught:
            await send(session, server, emit=emit)
    assert (caught.value.kind, caught.value.body, got) == (kind, {"error": error}, ["The"])
    async with answers({"error": error}) as server:
        with pytest.raises(EngineError, match=message):
            await send(session, server)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", {"choices": []}, {"choices": [{"message": None}]}, {"choices": [None]}]
)
async def test_a_body_that_is_no_completion(session: aiohttp.ClientSession, body: Any) -> None:
    async with answers(body) as server:
        with pytest.raises(EngineError) as caught:
            await send(session, server)
    assert caught.value.kind == "bad_reply"


async def test_a_body_without_a_finish_reason_is_cut(session: aiohttp.ClientSession) -> None:
    async with answers({"choices": [{"message": {"content": "The"}, "finish_reason": None}]}) as server:
        with pytest.raises(StreamBroken):
            await send(session, server)


async def test_chunks_that_are_no_json(session: aiohttp.ClientSession) -> None:
    for bad in ('{"choices": [', "[1]", '"text"'):
        async with streams(bad) as server:
            with pytest.raises(StreamBroken):
                await send(session, server)


@pytest.mark.parametrize(
    ("status", "refused"),
    [
        (400, True),
        (401, True),
        (404, True),
        (422, True),
        (408, False),
        (429, False),
        (500, False),
        (503, False),
    ],
)
async def test_error_statuses(session: aiohttp.ClientSession, status: int, refused: bool) -> None:
    for body, message in (
        ({"error": {"message": "no luck"}}, "no luck"),
        ({"error": "no luck"}, "no luck"),
        ({"error": {}}, "error"),
        (b"<h1>no luck</h1>", "no luck"),
        (b"", "empty body"),
        (b"[1]", r"\[1\]"),
    ):
        async with answers(body, f"{status} Bad") as server:
            with pytest.raises(EngineError, match=f"HTTP {status}.*{message}") as caught:
                await send(session, server)
        assert isinstance(caught.value, EngineRefused) is refused
        assert caught.value.status == status
        assert caught.value.kind == ("refused" if refused else f"http_{status}")


async def test_no_server_is_a_connection_failure(session: aiohttp.ClientSession) -> None:
    async with answers({}) as server:
        pass
    with pytest.raises(EngineError) as caught:
        await send(session, server)
    assert caught.value.kind == "connection"


async def test_the_limit_covers_the_whole_exchange(session: aiohttp.ClientSession) -> None:
    async def drip(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while not writer.is_closing():  # never silent for long, never done
            writer.write(chunk(sse(delta(content="x"))))
            await writer.drain()
            await asyncio.sleep(0.01)

    async with RawServer(drip) as server:
        with pytest.raises(EngineTimeout, match=r"0\.2 s"):
            await send(session, server, timeout_s=0.2)


async def test_there_is_no_hidden_limit() -> None:
    async with open_session() as session:
        limits = session.timeout
        assert (limits.total, limits.connect, limits.sock_connect, limits.sock_read) == (None,) * 4
        assert isinstance(session.connector, aiohttp.TCPConnector)
        assert (session.connector.limit, session.connector.limit_per_host) == (0, 0)
        assert not session.trust_env


async def test_128_requests_are_in_flight_together(session: aiohttp.ClientSession) -> None:
    here = most = 0
    everyone = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal here, most
        here += 1
        most = max(most, here)
        if here == 128:
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 10)  # fewer in flight than 128 would never get on
        here -= 1
        writer.write(STREAM_HEAD + chunk(sse(delta("stop", content="x"), "[DONE]")) + END)

    async with RawServer(answer) as server:
        results = await asyncio.gather(*(send(session, server) for _ in range(128)))
    assert most == 128 and {result.text for result in results} == {"x"}


async def test_events_may_be_split_anywhere(session: aiohttp.ClientSession) -> None:
    raw = b": comment\n\nevent: x\ndata:" + sse(delta(content="a\u00e9b"))[5:].replace(b"\n", b"\r\n")
    raw += b'data: {"choices":\ndata: [{"delta": {"content": "\xe2\x82\xac"}}]}\n\n' + sse(delta("stop"))
    raw += b"data: [DONE]"  # not even a newline

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for at in range(len(raw)):
            writer.write(chunk(raw[at : at + 1]))
            await asyncio.sleep(0)
        writer.write(END)

    async with RawServer(answer) as server:
        assert (await send(session, server)).text == "a\u00e9b\u20ac"


async def test_tool_calls_are_put_together(session: aiohttp.ClientSession) -> None:
    def call(index: int, **fields: Any) -> dict[str, Any]:
        return delta(tool_calls=[{"index": index, **fields}])

    async with streams(
        ROLE,
        call(0, id="c1", function={"name": "price", "arguments": ""}),
        call(0, function={"arguments": '{"item"'}),
        call(1, id="c2", function={"name": "stock", "arguments": "{}"}),
        call(0, function={"arguments": ": 1}"}),
        delta("tool_calls"),
        "[DONE]",
    ) as server:
        result = await send(session, server)
    assert result.finish_reason == "tool_calls" and result.first_content_ns is not None
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in result.tool_calls] == [
        ("c1", "price", '{"item": 1}'),
        ("c2", "stock", "{}"),
    ]


async def test_a_connection_is_used_again_after_a_stream(session: aiohttp.ClientSession) -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(sse(delta("stop", content="x"), "[DONE]")))
        await writer.drain()
        await asyncio.sleep(0.01)  # the end comes by itself, as from most servers
        writer.write(END)

    async with RawServer(answer) as server:
        for _ in range(3):
            assert (await send(session, server)).text == "x"
        assert server.connections == 1


async def test_a_server_that_keeps_the_stream_open_after_its_end(session: aiohttp.ClientSession) -> None:
    over = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(sse(delta("stop", content="x"), "[DONE]")))
        await writer.drain()
        await over.wait()

    async with RawServer(answer) as server:
        assert (await send(session, server)).text == "x"
        over.set()


async def test_one_exchange_is_one_request() -> None:
    async with serving(rules=[{"fault": "disconnect"}]) as service, open_session() as session:
        url = service.service.endpoints["target"].url
        with pytest.raises(EngineError):
            await send_chat(session, f"{url}/chat/completions", ask(), timeout_s=5)
        assert len(service.requests()) == 1


async def test_the_body_is_sent_as_given(session: aiohttp.ClientSession) -> None:
    body = ask("caf\u00e9 \ud83d", stream=True, x={"y": [None]})
    async with streams(delta("stop", content="x"), "[DONE]") as server:
        url = f"{server.url}/chat/completions"
        await send_chat(session, url, body, headers={"X-Own": "1"}, timeout_s=5)
    assert json.dumps(server.bodies) == json.dumps([body])
    assert "X-Own: 1" in server.headers[0]

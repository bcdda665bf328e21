from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.method import ChatRequest
from bench.registry import workload
from methods.exactcache import request_key
from runners.client import Endpoint
from tests.serving import (
    END,
    STREAM_HEAD,
    Answer,
    FakeExecutor,
    RawServer,
    Served,
    ask,
    chunk,
    delta,
    serving,
    sse,
    until,
)

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": "{}"}}


def key(*turns: tuple[str, Any] | dict[str, Any], model: str = "m", **params: Any) -> str:
    messages = [turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns]
    return request_key(ChatRequest(model, tuple(messages), params))


def test_the_whole_conversation_is_the_key() -> None:
    keys = {
        key(("system", "be brief"), ("user", "who runs Firm A?"), ("user", "how old is that person?")),
        key(("system", "be brief"), ("user", "who runs Firm B?"), ("user", "how old is that person?")),
        key(
            ("system", "answer in French"), ("user", "who runs Firm A?"), ("user", "how old is that person?")
        ),
        key(("user", "be brief"), ("user", "who runs Firm A?"), ("user", "how old is that person?")),
        key(("user", "who runs Firm A?"), ("user", "how old is that person?")),
        key(("user", "how old is that person?")),
    }
    assert len(keys) == 6


def test_every_parameter_is_in_the_key_and_their_order_is_not() -> None:
    rows: list[dict[str, Any]] = [
        {"model": "m1", "max_tokens": 16},
        {"model": "m1", "max_tokens": 4000},
        {"model": "m2", "max_tokens": 16},
        {"model": "m1", "max_tokens": 16, "n": 2},
        {"model": "m1", "max_tokens": 16, "temperature": 0},
        {"model": "m1", "max_tokens": 16, "temperature": 0.5},
        {"model": "m1", "max_tokens": 16, "stop": ["\n"]},
        {"model": "m1", "max_tokens": 16, "tool_choice": "none"},
        {"model": "m1", "max_tokens": 16, "response_format": {"type": "json_object"}},
        {"model": "m1", "max_tokens": 16, "seed": 1},
        {"model": "m1", "max_tokens": 16, "tools": [CALL]},
    ]
    keys = [key(("user", "hi"), **row) for row in rows]
    assert len(set(keys)) == len(rows)
    assert key(("user", "hi"), max_tokens=16, model="m1") == keys[0]
    one = key({"role": "user", "content": "hi"}, a=1, b={"x": 1, "y": 2})
    assert one == key({"content": "hi", "role": "user"}, b={"y": 2, "x": 1}, a=1)


def test_tool_calls_and_null_are_in_the_key() -> None:
    user = {"role": "user", "content": "price?"}
    assistant = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "12.5"}
    keys = {
        key(user, assistant, result),
        key(user, assistant, {**result, "content": "13"}),
        key(user, {**assistant, "content": "None"}, result),
        key(user, {**assistant, "content": ""}, result),
        key(user, {**assistant, "tool_calls": [{**CALL, "id": "c2"}]}, result),
        key(user, assistant, {**result, "tool_call_id": "c2"}),
    }
    assert len(keys) == 6
    key(("user", "half \ud83d"))


def kind(answer: Answer) -> str:
    found: str = answer.cache["kind"]
    return found


async def test_the_second_identical_request_is_a_hit_that_spends_nothing() -> None:
    text = " ".join(["word"] * 120)
    async with serving("exactcache", default=text) as service:
        first = await service.chat(**USAGE)
        assert kind(first) == "miss" and first.usage is not None
        assert first.usage["completion_tokens"] == 120 and first.cache["saved_tokens"] is None
        for body in ({}, USAGE):
            hit = await service.chat(**body)
            assert (hit.text, hit.finish, hit.calls) == (text, "stop", [])
            assert hit.cache == {
                "kind": "exact",
                "key": first.cache["key"],
                "similarity": None,
                "reason": "stored",
                "saved_tokens": 120,
            }
            assert hit.usage == {
                "prompt_tokens": 0,
                "completion_tokens": 0,
                "total_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
        assert len(service.requests()) == 1


async def test_only_clean_replies_are_stored() -> None:
    rules: list[dict[str, Any]] = [
        {"match": "cut", "reply": "The total is 4", "finish_reason": "length"},
        {"match": "slow", "fault": "429"},
        {"match": "empty", "fault": "empty"},
        {"match": "blank", "reply": "\n "},
        {"match": "filtered", "reply": "x", "finish_reason": "content_filter"},
        {"match": "misplaced", "reasoning": "The answer is 9.8"},
        {"match": "thought", "reply": "<think>hm</think>"},
        {"match": "half", "fault": "cut_stream", "reply": "The tot al is"},
        {"match": "error", "fault": "error_event", "reply": "The tot al is"},
        {"match": "clean", "reply": "42"},
    ]
    async with serving("exactcache", rules=rules) as service:
        for number, rule in enumerate(rules[:-1]):
            for stream in (False, True):
                off = {"enable_thinking": False}
                answer = await service.chat(rule["match"], stream=stream, chat_template_kwargs=off)
                assert not answer.ok or (kind(answer) == "miss" and "not stored" in answer.cache["reason"])
            assert len(service.requests()) == 2 * (number + 1)
        assert await service.events() == []
        await service.chat("clean")
        assert kind(await service.chat("clean")) == "exact"
        assert [event["text"] for event in await service.events()] == ["42"]


async def test_a_cut_reply_is_asked_for_again_as_the_client_asked() -> None:
    rules = [
        {"reply": '{"items": ["kale", "rice"', "finish_reason": "length", "times": 1},
        {"reply": "whole"},
    ]
    async with serving("exactcache", rules=rules) as service:
        cut = await service.chat(max_tokens=20)
        assert (cut.text, cut.finish, len(service.requests())) == ('{"items": ["kale", "rice"', "length", 1)
        assert (await service.chat(max_tokens=20)).text == "whole"


async def test_tool_calls_are_stored_and_served_in_full() -> None:
    parts = [
        delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "price", "arguments": "{}"}}]),
        delta("tool_calls"),
        "[DONE]",
    ]

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(sse(*parts)) + END)

    async with serving("exactcache") as service, RawServer(answer) as engine:
        service.service.endpoints = {"target": Endpoint(engine.url)}
        for expected in ("miss", "exact"):
            got = await service.chat(tools=[CALL])
            assert (kind(got), got.finish, got.tool_calls) == (expected, "tool_calls", [CALL])
        streamed = await service.chat(tools=[CALL], stream=True)
        assert streamed.tool_calls == [{"index": 0, **CALL}] and streamed.finish == "tool_calls"
        assert len(engine.bodies) == 1


class Gate:
    """An engine whose requests wait until told how to end."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[str]] = []
        self.server = RawServer(self._answer)

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        text = await future
        if text:
            writer.write(STREAM_HEAD + chunk(sse(delta("stop", content=text), "[DONE]")) + END)
        else:
            writer.write(b"HTTP/1.1 500 Bad\r\nContent-Length: 2\r\n\r\nno")

    async def arrivals(self, count: int) -> None:
        await until(lambda: len(self.waiting) == count)


async def gated(service: Served, gate: Gate) -> None:
    service.service.endpoints = {"target": Endpoint(gate.server.url, timeout_s=20)}


async def all_in(service: Served, count: int) -> None:
    """Wait until ``count`` requests are inside the service."""
    in_flight = service.service.telemetry._in_flight
    await until(lambda: in_flight._value.get() == count)


async def test_identical_misses_wait_for_one_call() -> None:
    gate = Gate()
    async with serving("exactcache") as service, gate.server:
        await gated(service, gate)
        same = [asyncio.create_task(service.chat("a", stream=n % 2 == 0)) for n in range(6)]
        other = asyncio.create_task(service.chat("b"))
        await all_in(service, 7)
        await gate.arrivals(2)
        for future, body in zip(gate.waiting, gate.server.bodies, strict=True):
            future.set_result("for " + body["messages"][0]["content"])
        answers = await asyncio.gather(*same)
        assert {answer.text for answer in answers} == {"for a"} and (await other).text == "for b"
        assert sorted(map(kind, answers)) == ["exact"] * 5 + ["miss"]
        assert {a.cache["reason"] for a in answers if kind(a) == "exact"} == {"coalesced"}
        assert len(gate.waiting) == 2
        assert service.method.stats() == {"entries": 2, "hits": 5, "misses": 2, "coalesced": 5}


async def test_the_failure_of_the_first_is_not_that_of_the_others() -> None:
    gate = Gate()
    async with serving("exactcache") as service, gate.server:
        await gated(service, gate)
        tasks = [asyncio.create_task(service.chat("a")) for _ in range(4)]
        await all_in(service, 4)
        await gate.arrivals(1)
        gate.waiting[0].set_result("")
        await gate.arrivals(2)
        gate.waiting[1].set_result("fine")
        answers = await asyncio.gather(*tasks)
        assert sorted(answer.status for answer in answers) == [200, 200, 200, 502]
        assert sorted(kind(a) for a in answers if a.ok) == ["exact", "exact", "miss"]
        assert len(gate.waiting) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_client_may_leave(stream: bool) -> None:
    gate = Gate()
    async with serving("exactcache") as service, gate.server:
        await gated(service, gate)
        async with aiohttp.ClientSession() as leaving:
            url = service.url + "/v1/chat/completions"
            first = asyncio.create_task(leaving.post(url, json=ask("a", stream=stream)))
            await gate.arrivals(1)
            others = [asyncio.create_task(service.chat("a", stream=stream)) for _ in range(3)]
            await all_in(service, 4)
            first.cancel()
        await gate.arrivals(2)  # one of the others asks for itself
        gate.waiting[1].set_result("fine")
        answers = await asyncio.gather(*others)
        assert [answer.text for answer in answers] == ["fine"] * 3
        assert sorted(map(kind, answers)) == ["exact", "exact", "miss"]
        assert len(gate.waiting) == 2
        assert kind(await service.chat("a", stream=stream)) == "exact"


async def test_a_waiting_client_may_leave() -> None:
    gate = Gate()
    async with serving("exactcache") as service, gate.server:
        await gated(service, gate)
        first = asyncio.create_task(service.chat("a"))
        await gate.arrivals(1)
        async with aiohttp.ClientSession() as leaving:
            url = service.url + "/v1/chat/completions"
            waiting = asyncio.create_task(leaving.post(url, json=ask("a")))
            await all_in(service, 2)
            waiting.cancel()
        await all_in(service, 1)
        gate.waiting[0].set_result("fine")
        assert (await first).text == "fine" and len(gate.waiting) == 1


async def test_a_reply_that_is_not_stored_is_not_shared() -> None:
    gate = Gate()
    async with serving("exactcache") as service, gate.server:
        await gated(service, gate)
        tasks = [asyncio.create_task(service.chat("a")) for _ in range(2)]
        await all_in(service, 2)
        await gate.arrivals(1)
        gate.waiting[0].set_result(" ")
        await gate.arrivals(2)
        gate.waiting[1].set_result("fine")
        assert sorted(answer.text for answer in await asyncio.gather(*tasks)) == [" ", "fine"]


async def test_the_least_recently_used_goes_and_a_replay_agrees(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    config = {"max_entries": 2}
    async with serving("exactcache", config=config, state=state) as service:
        kinds = [kind(await service.chat(text)) for text in ("a", "b", "a", "c", "b", "c")]
        assert kinds == ["miss", "miss", "exact", "miss", "miss", "exact"]
        events = await service.events()
        assert len(events) == 2 and service.method.stats()["entries"] == 2
    operations = [json.loads(line)["event"]["op"] for line in state.read_text().splitlines()]
    assert operations == ["put", "put", "touch", "put", "put", "touch"]
    async with serving("exactcache", config=config, state=state) as again:
        assert await again.events() == events
        assert [kind(await again.chat(text)) for text in ("d", "b", "c")] == ["miss", "miss", "miss"]
        assert [event["op"] for event in events] == ["put", "put"]
    async with serving("exactcache", config={"max_entries": 1}, state=state) as smaller:
        assert len(await smaller.events()) == 1
    async with serving("exactcache") as unlimited:
        for text in ("a", "b", "c", "a"):
            await unlimited.chat(text)
        assert unlimited.method.stats() == {"entries": 3, "hits": 1, "misses": 3, "coalesced": 0}


async def test_it_restarts_warm_even_from_a_torn_file(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    async with serving("exactcache", state=state, default="first") as service:
        await service.chat("a")
    with state.open("ab") as file:
        file.write(b'{"request": "x", "event": {"op": "pu')
    async with serving("exactcache", state=state, default="second") as service:
        assert (await service.chat("a")).text == "first"
        assert (await service.chat("b")).text == "second"
        assert not any(body["messages"][0]["content"] == "b" for body in service.requests()[1:])
    async with serving("exactcache", state=state, default="third") as service:
        assert [(await service.chat(text)).text for text in "ab"] == ["first", "second"]
        assert service.requests() == []


async def test_the_task_decides_the_miss_path() -> None:
    rules = [{"match": "Reply with the Python program only", "reply": "```python\nanswer = 6 * 7"}]
    executor = FakeExecutor(value=42)
    async with serving(
        "exactcache", task=workload("formula").task, rules=rules, executor=executor
    ) as service:
        miss, hit = await service.chat(), await service.chat()
        assert (miss.text, hit.text) == ("42.00", "42.00")
        assert (kind(miss), kind(hit)) == ("miss", "exact")
        assert [call["purpose"] for call in miss.calls] == ["program"]
        assert hit.details == miss.details
        assert miss.details["program"].endswith("answer = 6 * 7") and miss.details["program_status"] == "ok"
        assert len(executor.programs) == 1
    async with serving("exactcache", executor=executor) as service:
        assert [call["purpose"] for call in (await service.chat()).calls] == ["answer"]


async def test_a_reset_forgets_entries_and_counts() -> None:
    async with serving("exactcache") as service:
        for _ in range(2):
            await service.chat()
        await service.post({}, "/admin/reset")
        assert service.method.stats() == {"entries": 0, "hits": 0, "misses": 0, "coalesced": 0}
        assert kind(await service.chat()) == "miss"


async def test_a_long_journal_is_compacted_to_the_same_state(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    config = {"max_entries": 2}
    async with serving("exactcache", config=config, state=state) as service:
        for _ in range(60):
            for text in ("a", "b"):
                await service.chat(text)
        long, events = len(state.read_text().splitlines()), await service.events()
        service.service.compact()
        assert long == 120 and len(state.read_text().splitlines()) == 2
        await service.chat("a")
    async with serving("exactcache", config=config, state=state) as service:
        assert sorted(event["key"] for event in await service.events()) == sorted(e["key"] for e in events)
        assert kind(await service.chat("b")) == "exact"

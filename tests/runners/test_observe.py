"""What the runner makes of a service's answers, against a server that answers as told."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.config import Cell
from bench.records import Record
from bench.registry import workload
from runners.chat import open_session
from runners.observe import Clock, Planned, observe, request_body
from tests.running import samples


class Server:
    """Answers every chat request with ``status`` and ``body``, or as an event stream."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.body: Any = {}
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((dict(request.headers), await request.json()))
        return web.json_response(self.body, status=self.status)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", one.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield one
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as one:
        yield one


CELL = Cell(method="pot", workload="formula", stream=False, timeout_s=5)


async def record(session: aiohttp.ClientSession, url: str, cell: Cell = CELL) -> Record:
    planned = Planned(cell, 1, 2, samples(3)[2])
    return await observe(session, url, "run", planned, 3, "run/x", workload("formula"), Clock(1000))


def completion(text: str, finish: str = "stop", **extension: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"choices": [choice], "usage": {"completion_tokens": 4}, "reusebench": extension}


async def test_ok(server: Server, session: aiohttp.ClientSession) -> None:
    begin = time.monotonic_ns()
    call = {
        "engine": "target",
        "purpose": "program",
        "started_ns": begin + 5,
        "finished_ns": begin + 9,
        "tokens_out": 3,
        "tries": 1,
    }
    server.body = completion(
        "Answer: 12.00",
        cache={"kind": "miss", "key": "k", "reason": "no entry"},
        received_ns=begin,
        stages=[["lookup", begin + 1, begin + 2], ["open", begin + 3, None]],
        calls=[call],
        details={"program": "answer = 12"},
    )
    clock = Clock(1000)
    one = await record(session, server.url)
    assert one.outcome == "ok" and one.grade is not None and one.grade.parsed
    assert one.grade.workload_version == workload("formula").version
    assert one.key == ("formula+pot", 1, 2) and one.attempt == 3
    assert one.sample == samples(3)[2].id and one.group == samples(3)[2].group
    assert one.reply == "Answer: 12.00" and one.finish_reason == "stop"
    assert one.usage == {"completion_tokens": 4}
    assert one.cache is not None and (one.cache.kind, one.cache.reason) == ("miss", "no entry")
    assert [(stage.name, stage.finished is None) for stage in one.stages] == [
        ("lookup", False),
        ("open", True),
    ]
    (kept,) = one.calls
    assert (kept.purpose, kept.tokens_out, kept.tokens_in, kept.first_token) == ("program", 3, None, None)
    assert kept.started is not None and kept.finished == kept.started + 4
    assert one.details == {"program": "answer = 12"}
    assert one.error is None
    assert 1000 <= one.times.scheduled <= one.times.started <= one.times.finished <= clock.now() + 1000
    assert one.times.first_content is None, "no stream, no first token"


async def test_the_request(server: Server, session: aiohttp.ClientSession) -> None:
    server.body = completion("Answer: 1.00")
    await record(session, server.url)
    ((headers, body),) = server.seen
    sample = samples(3)[2]
    assert headers["x-reusebench-request"] == "run/x"
    assert body["messages"] == [dict(message) for message in sample.messages]
    assert body["temperature"] == 0 and body["seed"] == CELL.selection.seed
    assert set(body) == {"model", "messages", "temperature", "max_tokens", "seed", "stream"}, (
        "nothing of the gold"
    )
    streamed = request_body(
        Planned(CELL.model_copy(update={"stream": True}), 0, 0, sample), workload("formula")
    )
    assert streamed["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("status", "code", "outcome", "kind"),
    [
        (500, "ExecutorFailed", "sandbox_error", "ExecutorFailed"),
        (500, "KeyError", "infra_error", "KeyError"),
        (502, "connection", "infra_error", "connection"),
        (502, "truncated_stream", "infra_error", "truncated_stream"),
        (504, "timeout", "timeout", "timeout"),
        (400, "refused", "refused", "refused"),
        (422, None, "refused", "refused"),
        (429, None, "infra_error", "http_429"),
        (503, None, "infra_error", "http_503"),
    ],
)
async def test_failures(
    server: Server,
    session: aiohttp.ClientSession,
    status: int,
    code: str | None,
    outcome: str,
    kind: str,
) -> None:
    now = time.monotonic_ns()
    call = {"engine": "target", "purpose": "answer", "started_ns": now, "tries": 2}
    server.status = status
    server.body = {"error": {"message": "so it is", "code": code}, "reusebench": {"calls": [call]}}
    one = await record(session, server.url)
    assert one.outcome == outcome
    assert one.error is not None and one.error.type == kind
    assert "so it is" in one.error.message
    assert (one.grade, one.reply, one.cache, one.usage) == (None, None, None, None)
    assert [kept.tries for kept in one.calls] == [2], "what was spent on a failure is known too"
    assert one.times.first_content is None


@pytest.mark.parametrize(
    ("text", "finish", "outcome", "graded"),
    [
        ("Answer: 12", "length", "truncated", False),
        ("nothing to say", "stop", "unparsed", True),
        ("", "stop", "unparsed", True),
    ],
)
async def test_replies_without_an_answer(
    server: Server, session: aiohttp.ClientSession, text: str, finish: str, outcome: str, graded: bool
) -> None:
    server.body = completion(text, finish)
    one = await record(session, server.url)
    assert one.outcome == outcome
    assert (one.grade is not None) is graded
    assert one.reply == text
    assert one.error is None


async def test_half_a_character_can_be_written_down(server: Server, session: aiohttp.ClientSession) -> None:
    """Servers that cut text between the halves of a UTF-16 pair send lone surrogates."""
    server.body = completion("Answer: 12.00 \ud83d\ude00 \ud83d", details={"program": "\udc00"})
    one = await record(session, server.url)
    again = Record.model_validate_json(one.model_dump_json())
    assert again.reply == "Answer: 12.00 \U0001f600 \ufffd"
    assert again.details == {"program": "\ufffd"}


async def test_no_server(session: aiohttp.ClientSession) -> None:
    one = await record(session, "http://127.0.0.1:9/v1")
    assert one.outcome == "infra_error"
    assert one.error is not None and one.error.type == "connection"


def test_the_clock_goes_on() -> None:
    earlier = Clock(0).now()
    later = Clock(10**12)
    assert later.now() >= 10**12 > earlier
    assert later.rebase(None) is None
    assert later.rebase(later.zero + 7) == 7

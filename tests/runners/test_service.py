from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from bench.engine import EngineCall
from bench.errors import EngineUnavailable, ReuseBenchError
from bench.execution import ProgramResult
from bench.method import CacheEvent, ChatRequest, Context, Reply
from bench.workload import GenericTask
from runners.chat import open_session, send_chat
from runners.client import Endpoint
from runners.serve import build_service, child_spec, free_socket, roles_of
from runners.service import REQUEST_HEADER
from tests.serving import END, STREAM_HEAD, RawServer, Served, ask, chunk, delta, metric, serving, sse, until

ROOT = Path(__file__).parents[2]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


class Scripted:
    """A method that does what a test tells it to."""

    def __init__(self, act: Any) -> None:
        self.act = act

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        reply: Reply = await self.act(request, context)
        return reply


def gated(release: asyncio.Event) -> RawServer:
    """An engine that sends one word, and the rest only when released; it notices when we hang up."""

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(sse(delta(content="one "))))
        await writer.drain()
        while not release.is_set():
            if writer.transport.is_closing():
                raise ConnectionError
            await asyncio.sleep(0.005)
        writer.write(chunk(sse(delta("stop", content="two"), "[DONE]")) + END)

    return RawServer(answer)


def on(service: Served, engine: RawServer) -> None:
    service.service.endpoints = {"target": Endpoint(engine.url, timeout_s=20)}


# The official client, unchanged.


@pytest.fixture
async def official() -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    rules = [
        {"match": "boom", "fault": "500"},
        {"match": "half", "fault": "error_event", "reply": "a b c d"},
        {"match": "cut", "fault": "cut_stream", "reply": "a b c d"},
        {"match": "no", "fault": "400"},
    ]
    async with serving("exactcache", rules=rules, default="one two\nthree", api_key="k-123") as service:
        url = service.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="k-123", max_retries=0) as client:
            yield service, client


def messages(text: str = "hi") -> Any:
    return [{"role": "user", "content": text}]


async def test_the_official_client_asks_with_and_without_a_stream(official: Any) -> None:
    _, client = official
    spent = []
    for text in ("new", "new"):
        whole = await client.chat.completions.create(model="m", messages=messages(text))
        assert whole.choices[0].message.content == "one two\nthree"
        assert (whole.choices[0].finish_reason, whole.model, whole.object) == ("stop", "m", "chat.completion")
        spent.append(whole.usage.completion_tokens)
    assert spent == [3, 0]
    for text, tokens in (("other", 3), ("other", 0)):
        stream = await client.chat.completions.create(model="m", messages=messages(text), **USAGE)
        pieces, usage, reasons = [], [], []
        async for event in stream:
            pieces += [choice.delta.content or "" for choice in event.choices]
            reasons += [choice.finish_reason for choice in event.choices if choice.finish_reason]
            if event.usage is not None:
                assert event.choices == []
                usage.append(event.usage)
        assert "".join(pieces) == "one two\nthree"
        assert [one.completion_tokens for one in usage] == [tokens] and reasons == ["stop"]
    plain = await client.chat.completions.create(model="m", messages=messages("plain"), stream=True)
    assert all([event.usage is None and event.choices async for event in plain])


async def test_the_official_client_sees_its_limits_honoured(official: Any) -> None:
    _, client = official

    async def ask_for(**limits: Any) -> tuple[str, str]:
        whole = await client.chat.completions.create(model="m", messages=messages(), **limits)
        stream = await client.chat.completions.create(model="m", messages=messages(), stream=True, **limits)
        text = "".join([c.delta.content or "" async for e in stream for c in e.choices])
        assert text == whole.choices[0].message.content
        return text, whole.choices[0].finish_reason

    assert await ask_for(stop=["\n"]) == ("one two", "stop")
    assert await ask_for(stop="two") == ("one ", "stop")
    assert await ask_for(max_completion_tokens=2) == ("one two", "length")
    assert await ask_for(max_tokens=1) == ("one", "length")


async def test_the_official_client_gets_its_own_exceptions(official: Any) -> None:
    service, client = official

    async def create(text: str = "hi", **body: Any) -> Any:
        return await client.chat.completions.create(model="m", messages=messages(text), **body)

    with pytest.raises(openai.BadRequestError) as refused:
        await create(n=3, max_completion_tokens=5, stop=["\n"])
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refused:
        await create(logprobs=True)
    assert refused.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError, match="scripted 400"):
        await create("no")
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as failed:
            await create("boom", stream=stream)
        assert failed.value.status_code == 502 and "scripted 500" in failed.value.message
    with pytest.raises(openai.APIError, match="scripted error"):
        async for _ in await create("half", stream=True):
            pass
    with pytest.raises(openai.APIError, match="closed before"):
        async for _ in await create("cut", stream=True):
            pass
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="m", input="x")
    for key in ("wrong", "k-1234"):
        other = client.with_options(api_key=key)
        with pytest.raises(openai.AuthenticationError):
            await other.chat.completions.create(model="m", messages=messages())
        with pytest.raises(openai.AuthenticationError):
            await other.models.list()
    assert [model.id async for model in client.models.list()] == ["exactcache"]
    for path, method in (("/admin/cache", "GET"), ("/admin/stats", "GET"), ("/admin/reset", "POST")):
        assert (await service.post({}, path, method)).status == 401


async def test_the_official_blocking_client() -> None:
    async with serving(default="fine enough") as service:

        def use() -> tuple[str | None, str]:
            with openai.OpenAI(base_url=service.url + "/v1", api_key="any", max_retries=0) as client:
                whole = client.chat.completions.create(model="m", messages=messages())
                stream = client.chat.completions.create(model="m", messages=messages(), stream=True)
                text = "".join(c.delta.content or "" for event in stream for c in event.choices)
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(model="m", messages=messages(), n=2)
                return whole.choices[0].message.content, text

        assert await asyncio.to_thread(use) == ("fine enough", "fine enough")


# Streams, and clients that leave.


async def test_tokens_pass_through_as_they_come() -> None:
    release = asyncio.Event()
    async with serving() as service, gated(release) as engine, open_session() as session:
        on(service, engine)
        got: list[str] = []

        async def emit(piece: str) -> None:
            got.append(piece)
            release.set()  # the engine goes on only when its first word is with the client

        url = service.url + "/v1/chat/completions"
        result = await send_chat(session, url, ask(stream=True), timeout_s=10, emit=emit)
    assert got == ["one ", "two"] and result.text == "one two"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["direct", "exactcache"])
async def test_a_client_that_leaves_takes_the_engine_call_with_it(name: str, stream: bool) -> None:
    release = asyncio.Event()
    async with serving(name) as service, gated(release) as engine:
        on(service, engine)
        async with aiohttp.ClientSession() as other:
            url = service.url + "/v1/chat/completions"
            if stream:
                async with other.post(url, json=ask(stream=True)) as reply:
                    assert await reply.content.readline()
            else:
                task = asyncio.create_task(other.post(url, json=ask()))
                await until(lambda: engine.bodies)
                task.cancel()
        await until(lambda: service.service.telemetry.summary()["total"] == 1)
        assert service.service.telemetry.summary() == {"total": 1, "ok": 0, "failed": 1}
        text = await service.get("/metrics")
        assert metric(text, "reusebench_requests_total", outcome="cancelled") == 1
        assert metric(text, "reusebench_requests_in_flight") == 0
        assert metric(text, "reusebench_engine_calls_total", outcome="error") == 1
        release.set()
        answer = await service.chat()
        assert answer.ok and answer.text == "one two"


async def test_a_client_that_leaves_before_the_first_word() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def act(request: ChatRequest, context: Context) -> Reply:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with serving(method=Scripted(act)) as service:
        async with aiohttp.ClientSession() as other:
            url = service.url + "/v1/chat/completions"
            task = asyncio.create_task(other.post(url, json=ask(stream=True)))
            await started.wait()
            task.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_failure_after_the_first_word_ends_the_stream_with_an_error() -> None:
    async with serving(rules=[{"fault": "cut_stream", "reply": "a b c d", "token_delay_s": 0.01}]) as service:
        answer = await service.chat(stream=True)
    assert answer.status == 200 and answer.text == "a b"
    assert answer.error is not None and answer.error["code"] == "truncated_stream"
    assert answer.finish is None and "[DONE]" not in answer.raw
    assert answer.calls[0]["error"]["type"] == "truncated_stream"  # the record still knows the call


@pytest.mark.parametrize("emit_first", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_in_a_method_is_a_500_and_the_service_lives_on(
    stream: bool, emit_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(request: ChatRequest, context: Context) -> Reply:
        if "bug" in str(request.messages):
            if emit_first:
                await context.emit("so far ")
            raise ZeroDivisionError("secret detail")
        return Reply("fine", CacheEvent("none"))

    async with serving(method=Scripted(act)) as service:
        with caplog.at_level(logging.ERROR):
            answer = await service.chat("bug", stream=stream)
        assert answer.status == (200 if stream and emit_first else 500)
        assert answer.error is not None
        assert (answer.error["type"], answer.error["code"]) == ("server_error", "ZeroDivisionError")
        assert "secret" not in answer.raw and "Traceback" not in answer.raw
        assert "secret detail" in caplog.text and "Traceback" in caplog.text
        assert (await service.chat()).text == "fine"
        text = await service.get("/metrics")
        assert metric(text, "reusebench_requests_total", outcome="error") == 1


async def test_what_was_emitted_is_not_sent_again() -> None:
    async def act(request: ChatRequest, context: Context) -> Reply:
        await context.emit("one ")
        await context.emit("")
        return Reply("one two", CacheEvent("none"))

    async with serving(method=Scripted(act)) as service:
        assert (await service.chat(stream=True)).text == "one two" == (await service.chat()).text


async def test_half_a_surrogate_pair_goes_through() -> None:
    half = "\ud83d"
    async with serving("exactcache", default="x") as service:
        for stream in (False, True):
            assert (await service.chat(f"a {half}", stream=stream)).ok
        assert json.dumps(half)[1:-1] in json.dumps(service.requests()[0])

    async def act(request: ChatRequest, context: Context) -> Reply:
        return Reply(half, CacheEvent("none"))

    async with serving(method=Scripted(act)) as service:
        for stream in (False, True):
            assert (await service.chat(stream=stream)).text == half


# Refusals.


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"hi"', b"\xff\xfe", b"[" * 100_000, b'{"messages": []}']
)
@pytest.mark.parametrize(("path", "method"), [("/v1/chat/completions", "POST"), ("/admin/cache", "PUT")])
async def test_a_body_that_is_no_request(raw: bytes, path: str, method: str) -> None:
    async with serving() as service:
        answer = await service.post(raw, path, method)
        assert answer.status == 400 and answer.error is not None
        assert answer.error["type"] == "invalid_request_error"
        assert not service.requests()


async def test_paths_and_methods_that_are_not_served() -> None:
    async with serving() as service:
        for path, method, status in (
            ("/v1/completions", "POST", 404),
            ("/", "GET", 404),
            ("/openapi.json", "GET", 404),
            ("/docs", "GET", 404),
            ("/v1/chat/completions", "GET", 405),
            ("/v1/models", "POST", 405),
        ):
            answer = await service.post({}, path, method)
            assert answer.status == status
            assert answer.error == {
                "message": f"{method} {path} is not served here",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }


@pytest.mark.filterwarnings("ignore:Sending a large body")
async def test_a_huge_request_goes_through() -> None:
    text = "word " * 1_000_000
    async with serving() as service:
        assert (await service.chat(text)).ok
        assert service.requests()[0]["messages"][0]["content"] == text


async def test_an_engine_that_refuses_our_key_is_no_fault_of_the_client() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        raw = b'{"error": {"message": "invalid key"}}'
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))

    async with serving() as service, RawServer(answer) as engine:
        on(service, engine)
        failed = await service.chat()
        assert failed.status == 502 and failed.error is not None and "invalid key" in failed.error["message"]


async def test_a_service_without_the_engine_that_its_method_wants() -> None:
    async with serving("direct-small", roles=["target"]) as service:
        answer = await service.chat()
        assert answer.status == 400 and answer.error is not None
        assert "needs a small engine" in answer.error["message"]


# Admin, metrics, state.


async def test_the_service_tells_what_it_did() -> None:
    rules = [{"match": "boom", "fault": "500"}]
    async with serving("exactcache", rules=rules, default="one two three") as service:
        for text in ("a", "a", "b", "boom"):
            await service.chat(text)
        stats = await service.get("/admin/stats")
        assert stats["method"] == "exactcache"
        assert stats["requests"] == {"total": 4, "ok": 3, "failed": 1}
        assert stats["state"] == {"entries": 2, "hits": 1, "misses": 3, "coalesced": 0}
        text = await service.get("/metrics")
        total = "reusebench_requests_total"
        assert metric(text, total) == 4
        assert metric(text, total, outcome="ok", cache="exact") == 1
        assert metric(text, total, outcome="ok", cache="miss") == 2
        assert metric(text, total, outcome="EngineError") == 1
        assert metric(text, "reusebench_request_seconds_count") == 3  # failures are no latencies
        assert metric(text, "reusebench_engine_calls_total", engine="target", outcome="ok") == 2
        assert metric(text, "reusebench_engine_calls_total", engine="target", outcome="error") == 1
        assert metric(text, "reusebench_engine_tokens_total", direction="out") == 6
        assert metric(text, "reusebench_state", name="entries") == 2
        assert await service.get("/health") == {"status": "ok", "method": "exactcache"}
        assert (await service.get("/v1/models"))["data"][0]["id"] == "exactcache"


async def test_state_is_reset_read_and_put() -> None:
    async with serving("exactcache") as service:
        await service.chat("a")
        cache = await service.get("/admin/cache")
        assert cache["method"] == "exactcache" and len(cache["events"]) == 1
        assert (await service.post({}, "/admin/reset")).raw == '{"reset":true}'
        assert await service.events() == []
        for bad, param in (
            ({"events": cache["events"]}, "method"),
            ({"method": "direct", "events": []}, "method"),
            ({"method": "exactcache"}, "events"),
            ({"method": "exactcache", "events": [1]}, "events"),
            ({"method": "exactcache", "events": [*cache["events"], {"op": "put", "key": "k"}]}, "events"),
            ({"method": "exactcache", "events": [{"op": "explode", "key": "k"}]}, "events"),
        ):
            answer = await service.post(bad, "/admin/cache", "PUT")
            assert answer.status == 400 and answer.error is not None and answer.error["param"] == param
            assert await service.events() == []
        assert (await service.post(cache, "/admin/cache", "PUT")).status == 200
        refused = await service.post({**cache, "events": [{"op": "put"}]}, "/admin/cache", "PUT")
        assert refused.status == 400 and await service.events() == cache["events"]
    async with serving("direct") as service:
        assert (await service.post({}, "/admin/reset")).raw == '{"reset":false}'
        assert await service.get("/admin/cache") == {"method": "direct", "state": None, "events": []}


async def test_changes_are_journalled_under_the_request_that_made_them(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    async with serving("exactcache", state=state) as service:
        async with service.http.post(
            service.url + "/v1/chat/completions", json=ask(), headers={REQUEST_HEADER: "cell/0/7"}
        ) as reply:
            assert (await reply.json())["id"] == "chatcmpl-cell/0/7"
        await service.chat("without a name")
    requests = [json.loads(line)["request"] for line in state.read_text().splitlines()]
    assert requests[0] == "cell/0/7" and re.fullmatch("[0-9a-f]{32}", requests[1])


async def test_the_trace_is_told_only_to_those_who_ask() -> None:
    async with serving() as service:
        async with service.http.post(service.url + "/v1/chat/completions", json=ask()) as reply:
            body = await reply.json()
            assert set(body["reusebench"]) == {"cache"}
            assert reply.headers["x-reusebench-cache"] == "none"
        assert {"received_ns", "stages", "calls", "details"} < set((await service.chat()).extension)


async def test_committing_without_state_is_a_bug_that_is_told() -> None:
    async def act(request: ChatRequest, context: Context) -> Reply:
        context.commit({"op": "put"})
        raise AssertionError

    async with serving(method=Scripted(act)) as service:
        assert (await service.chat()).status == 500


async def test_usage_is_unknown_where_the_engine_does_not_tell() -> None:
    async def act(request: ChatRequest, context: Context) -> Reply:
        context.trace.calls.append(EngineCall("target", "answer"))
        return Reply("x", CacheEvent("none"))

    async with serving(method=Scripted(act)) as service:
        assert json.loads((await service.chat()).raw)["usage"] is None
        assert (await service.chat(**USAGE)).events[-2]["usage"] is None


async def test_the_executor_ends_with_the_service() -> None:
    class Executor:
        closed = False

        async def run(self, code: str, *, arguments: Any = None) -> ProgramResult:
            raise AssertionError

        async def close(self) -> None:
            self.closed = True

    executor = Executor()
    async with serving(executor=executor):
        assert not executor.closed
    assert executor.closed


# Building and starting.


def test_a_state_file_that_is_damaged_or_of_another_method_is_told(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    for text in ('{"request": null, "event": {"kind": "other"}}\n', '{"request": null, "ev\n'):
        path.write_text(text)
        with pytest.raises(ReuseBenchError, match="Delete the file"):
            build_service("exactcache", {}, GenericTask(), {}, state=path)
        spec = tmp_path / "spec.json"
        spec.write_text(child_spec("exactcache", {}, "formula", {}, path))
        with free_socket() as sock:
            command = [sys.executable, "-m", "runners.serve", str(spec), "--fd", str(sock.fileno())]
            child = subprocess.run(
                [*command, "--parent", str(os.getpid())],
                cwd=ROOT,
                capture_output=True,
                text=True,
                pass_fds=(sock.fileno(),),
                timeout=60,
                check=False,
            )
        assert child.returncode == 1
        assert "Delete the file" in child.stderr and "Traceback" not in child.stderr


def test_a_child_is_told_where_its_key_is_and_not_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-secret")
    endpoint = Endpoint("http://x/v1", "m", api_key_env="OPENAI_API_KEY", params={"top_k": 1}, tries=2)
    spec = child_spec("direct", {}, "formula", {"target": endpoint}, Path("s"))
    assert "k-secret" not in spec
    assert Endpoint(**json.loads(spec)["endpoints"]["target"]) == endpoint
    assert endpoint.headers() == {"Authorization": "Bearer k-secret"}


async def test_no_key_is_told_or_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "k-engine")
    caplog.set_level(logging.DEBUG)
    rules = [{"match": "boom", "fault": "500"}]
    async with serving("exactcache", rules=rules, api_key="k-service") as service:
        endpoints = service.service.endpoints
        service.service.endpoints = {
            role: Endpoint(one.url, api_key_env="ENGINE_KEY", timeout_s=5) for role, one in endpoints.items()
        }
        service.http.headers["Authorization"] = "Bearer k-service"
        said = [(await service.chat(text)).raw for text in ("a", "a", "boom")]
        said += [await service.get("/metrics"), str(await service.get("/admin/stats"))]
        said += [str(await service.events()), caplog.text, *capfd.readouterr()]
        service.http.headers["Authorization"] = "Bearer k-wrong"
        said.append((await service.chat()).raw)
    assert said[0].startswith("{") and not any(re.search("k-(engine|service|wrong)", text) for text in said)


def test_a_taken_address_is_told() -> None:
    with free_socket() as sock:
        sock.listen()
        with pytest.raises(EngineUnavailable, match="--port"):
            free_socket(port=sock.getsockname()[1])


async def test_replies_do_not_wait_for_acknowledgements() -> None:
    """asyncio switches Nagle's algorithm off only where the socket names its protocol."""
    with free_socket() as sock:
        assert sock.proto == socket.IPPROTO_TCP
        off: list[int] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            off.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(serve, sock=sock):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            await reader.read()
            writer.close()
    assert off == [1]


def test_roles_follow_the_settings() -> None:
    assert roles_of("direct", {}) == ("target",)
    assert roles_of("direct-small", {}) == ("small",)
    assert roles_of("direct", {"engine": "small"}) == ("small",)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_deployed_service_ends_in_order(number: signal.Signals, tmp_path: Path) -> None:
    """The engines are stopped, and not left behind: the engine here writes down its end."""
    script = """
import asyncio, sys
from pathlib import Path
from bench.config import EngineConfig, PairConfig
from runners.deploy import deploy
from runners.engines.mock import MockEngine

class Slow(MockEngine):
    async def stop(self):
        await asyncio.sleep(0.05)
        await super().stop()
        Path(sys.argv[1]).write_text("stopped")

import runners.pair
runners.pair.engine_class = lambda kind: Slow
pair = PairConfig(target=EngineConfig(kind="mock", script={"default": "fine"}))
deploy("direct", {}, pair, None, None, "127.0.0.1", 0, None, lambda text: print(text, flush=True))
"""
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", script, str(mark)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        client = openai.OpenAI(base_url=found[0], api_key="x", max_retries=5)
        with client:
            said = client.chat.completions.create(model="m", messages=messages())
        assert said.choices[0].message.content == "fine"
        process.send_signal(number)
        assert process.wait(20) == 0, process.stderr.read()
        assert "Traceback" not in process.stderr.read()
    assert mark.read_text() == "stopped"

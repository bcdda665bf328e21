"""A method served over real HTTP in front of scripted engines, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from bench.config import EngineConfig
from bench.engine import Role
from bench.execution import ProgramResult
from bench.method import Environment
from bench.registry import method_class, variant
from bench.workload import GenericTask, Task
from runners.client import Endpoint
from runners.engines.mock import MockEngine
from runners.journal import Journal
from runners.serve import free_socket
from runners.service import TRACE_HEADER, Service, create_app
from tests.encoding import HashEncoder

USER = {"role": "user", "content": "How much is it?"}


def ask(text: str = "How much is it?", **body: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **body}


def events_of(raw: str) -> list[Any]:
    datas = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


class Answer:
    """A reply of the service, streamed or not, in one form."""

    def __init__(self, status: int, raw: str, headers: Mapping[str, str]) -> None:
        self.status = status
        self.raw = raw
        self.headers = headers
        self.events: list[Any] = []
        self.error: dict[str, Any] | None = None
        self.text, self.finish, self.usage, self.extension = "", None, None, {}
        self.tool_calls: list[Any] = []
        if headers.get("content-type", "").startswith("text/event-stream"):
            self.events = events_of(raw)
            for event in self.events:
                if event != "[DONE]":
                    self._take(event)
        elif raw.startswith("{"):
            self._take(json.loads(raw))

    def _take(self, body: dict[str, Any]) -> None:
        self.error = body.get("error") or self.error
        self.usage = body.get("usage") or self.usage
        self.extension = body.get("reusebench") or self.extension
        for choice in body.get("choices", ()):
            message = choice.get("delta") or choice.get("message") or {}
            self.text += message.get("content") or ""
            self.tool_calls += message.get("tool_calls") or []
            self.finish = choice["finish_reason"] or self.finish

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def cache(self) -> dict[str, Any]:
        return self.extension["cache"]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.extension["calls"]

    @property
    def details(self) -> dict[str, Any]:
        return self.extension["details"]


class Served:
    """A running service, its engines, and a client."""

    def __init__(
        self, url: str, service: Service, engines: dict[Role, MockEngine], http: aiohttp.ClientSession
    ) -> None:
        self.url = url
        self.service = service
        self.engines = engines
        self.http = http

    @property
    def method(self) -> Any:
        return self.service.method

    def requests(self, role: Role = "target") -> list[dict[str, Any]]:
        return self.engines[role].requests

    async def post(self, data: Any, path: str = "/v1/chat/completions", method: str = "POST") -> Answer:
        """Send raw bytes, or an object as JSON, and read everything."""
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        headers = {TRACE_HEADER: "1", "Content-Type": "application/json"}
        async with self.http.request(method, self.url + path, data=raw, headers=headers) as reply:
            found = {key.lower(): value for key, value in reply.headers.items()}
            return Answer(reply.status, await reply.text(), found)

    async def chat(self, text: str = "How much is it?", **body: Any) -> Answer:
        return await self.post(ask(text, **body))

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as reply:
            assert reply.status == 200
            return await (reply.json() if reply.content_type == "application/json" else reply.text())

    async def background(self, wait_s: float = 20) -> list[dict[str, Any]]:
        """Wait until nothing works beside the requests, and return what did."""
        told = await self.get(f"/admin/background?wait_s={wait_s}")
        assert told["running"] == 0
        return told["finished"]

    async def events(self) -> list[Any]:
        return (await self.get("/admin/cache"))["events"]


class FakeExecutor:
    """Ends every program in one way."""

    def __init__(self, status: str = "ok", value: object = 42, error: str | None = None) -> None:
        self.result = ProgramResult(status, value, "", error, 1)  # type: ignore[arg-type]
        self.programs: list[str] = []
        self.closed = False

    async def run(self, code: str, *, arguments: dict[str, object] | None = None) -> ProgramResult:
        self.programs.append(code)
        return self.result

    async def close(self) -> None:
        self.closed = True


class QuickExecutor:
    """Runs a test's own programs in this process: what isolation costs is of no interest to most tests."""

    async def run(self, code: str, *, arguments: dict[str, object] | None = None) -> ProgramResult:
        space: dict[str, Any] = {}
        try:
            exec(code, space)
            value = space["solve"](**(arguments or {})) if "solve" in space else space["answer"]
        except Exception as error:  # noqa: BLE001 - whatever the program raises
            return ProgramResult("error", None, "", repr(error), 1)
        return ProgramResult("ok", value, "", None, 1)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application in this event loop, without the server's own waits and signals."""
    with free_socket() as sock:
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", log_config=None)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        port = sock.getsockname()[1]
        await server.startup(sockets=[sock])
        assert server.started
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            for one in server.servers:
                one.close()
            for connection in list(server.server_state.connections):
                connection.transport.close()
            if tasks := list(server.server_state.tasks):
                await asyncio.wait(tasks, timeout=5)
            await server.lifespan.shutdown()


@asynccontextmanager
async def serving(
    name: str = "direct",
    *,
    rules: Sequence[Mapping[str, Any]] = (),
    default: str = "fine",
    config: Mapping[str, Any] | None = None,
    task: Task | None = None,
    executor: Any = None,
    encoder: Any = None,
    state: Path | None = None,
    api_key: str | None = None,
    endpoint: Mapping[str, Any] | None = None,
    roles: Sequence[Role] = ("target", "small"),
    method: Any = None,
) -> AsyncIterator[Served]:
    """Serve a method, or the given object, in front of a mock per role; both follow one script."""
    async with AsyncExitStack() as stack:
        engines: dict[Role, MockEngine] = {}
        endpoints: dict[Role, Endpoint] = {}
        for role in roles:
            script = {"rules": [dict(rule) for rule in rules], "default": default}
            engine = engines[role] = MockEngine(EngineConfig(kind="mock", script=script), role)
            stack.push_async_callback(engine.stop)
            options = {"timeout_s": 10.0, **(endpoint or {})}
            endpoints[role] = Endpoint(await engine.start(Path()), model=f"mock-{role}", **options)
        environment = Environment(
            task or GenericTask(), executor or QuickExecutor(), encoder or HashEncoder()
        )
        if method is None:
            spec = variant(name)
            cls: Any = method_class(spec.method)
            method = cls(cls.Config(**{**spec.config, **(config or {})}), environment)
        service = Service(name, method, environment, endpoints, Journal(state), api_key)
        service.restore()
        url = await stack.enter_async_context(listening(create_app(service)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Served(url, service, engines, http)


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until something has happened; a test that waits in vain fails."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def metric(text: str, name: str, /, **labels: str) -> float:
    """Return the sum over the samples of a Prometheus text that carry ``labels``."""
    from prometheus_client.parser import text_string_to_metric_families

    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found)


class RawServer:
    """An HTTP server that answers with the bytes it is given: what no well-behaved server would send.

    ``answer`` is called once per request with the request's body and the stream to write to.
    """

    def __init__(self, answer: Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.connections = 0

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(line.partition(":")[2])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length")
                )
                self.headers.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                await self._answer(self.bodies[-1], writer)
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def sse(*payloads: Any) -> bytes:
    """Server-sent events; a string is sent as it is."""
    return b"".join(
        b"data: " + (one if isinstance(one, str) else json.dumps(one)).encode() + b"\n\n" for one in payloads
    )


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """One chunk of a completion."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def streams(*payloads: Any, end: bytes = END) -> RawServer:
    """A server that answers every request with one stream."""

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(sse(*payloads)) + end)
        if not end:
            writer.close()

    return RawServer(answer)


def answers(body: Any, status: str = "200 OK", kind: str = "application/json") -> RawServer:
    """A server that answers every request with one body."""

    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)

    return RawServer(answer)

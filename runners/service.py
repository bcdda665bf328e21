"""The service: one method behind an OpenAI-compatible HTTP API.

The runner drives nothing else, and it is what a user deploys in front of a model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from bench.engine import Role
from bench.errors import EngineError, EngineRefused, EngineTimeout, ReuseBenchError, UsageError
from bench.method import (
    Background,
    ChatRequest,
    Describable,
    Environment,
    Method,
    Reply,
    StateEvent,
    Stateful,
    Trace,
)
from runners.chat import open_session
from runners.client import Endpoint, InstrumentedClient
from runners.journal import Journal
from runners.protocol import BadRequest, Streamed, completion_body, error_body, parse_request, usage_of
from runners.recording import Recording
from runners.telemetry import Telemetry

__all__ = ["REQUEST_HEADER", "TRACE_HEADER", "Service", "create_app"]

_LOG = logging.getLogger(__name__)
_CLIENT_GONE = 499  # nobody reads it; the number is what proxies log for this

REQUEST_HEADER = "x-reusebench-request"
"""Names the request in the journal; a fresh id is made where it is absent."""
TRACE_HEADER = "x-reusebench-trace"
"""Asks for the full trace (stages, engine calls) in the reply's ``reusebench`` field."""


@dataclass(slots=True)
class Service:
    """Everything that one served method lives with.

    Attributes:
        name: Registered name of the method, also its model name in ``/v1/models``.
        method: The method.
        environment: What it was built with; its executor is closed with the service.
        endpoints: Engines by role.
        journal: Where state changes go.
        api_key: Bearer token that every request must carry; None means open.
        recording: Where answered engine calls go.
    """

    name: str
    method: Method
    environment: Environment
    endpoints: Mapping[Role, Endpoint]
    journal: Journal
    api_key: str | None = None
    session: aiohttp.ClientSession | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    recording: Recording = field(default_factory=lambda: Recording(None))
    background: BackgroundWork = field(default_factory=lambda: BackgroundWork())

    @property
    def state(self) -> Stateful | None:
        """The method's stateful side, or None."""
        return self.method if isinstance(self.method, Stateful) else None

    async def open(self) -> None:
        """Connect and load what the method needs; the state is restored before, where a fault in it still
        ends in a clean error.
        """
        self.session = open_session(reuse=False)
        if getattr(self.method, "needs_encoder", False):
            await self.environment.encoder.embed(["warm up"])

    def restore(self) -> None:
        """Make the method's state what the journal says.

        Raises:
            ReuseBenchError: The journal is damaged, or of another method.
        """
        if self.state is None:
            return
        try:
            _rebuild(self.state, self.journal.read())
        except _NOT_OURS as error:
            raise ReuseBenchError(
                f"{self.journal.path} holds an event that is not one of {self.name}'s ({error!r}). "
                "Is it another method's? Delete the file to start empty."
            ) from error

    def compact(self) -> None:
        """Rewrite the journal as the present state where it has grown to far more than that.

        For deployment only: a run's journal keeps under which request each change was made.
        """
        if self.state is not None:
            events = list(self.state.snapshot())
            if sum(1 for _ in self.journal.read()) > 2 * len(events) + 100:
                self.journal.replace(events)

    async def close(self) -> None:
        """Stop what still works, the executor too, and close connections and files."""
        await self.background.cancel()
        await self.environment.executor.close()
        if self.session is not None:
            await self.session.close()
        self.journal.close()
        self.recording.close()

    async def reset(self) -> None:
        """Forget the method's state; work in the background is cancelled first."""
        await self.background.cancel()
        if self.state is not None:
            self.state.reset()
            self.journal.replace([])

    async def replace_state(self, events: list[StateEvent]) -> None:
        """Forget the present state and apply ``events``; a bad event leaves the state as it was.

        Work in the background is cancelled first.

        Raises:
            BadRequest: The method has no state, or an event is not one of its own.
        """
        state = self.state
        if state is None:
            raise BadRequest(f"{self.name} keeps no state", param="events")
        await self.background.cancel()
        before = list(state.snapshot())
        try:
            _rebuild(state, events)
        except _NOT_OURS as error:
            _rebuild(state, before)
            raise BadRequest(f"an event is not one of {self.name}'s: {error!r}", param="events") from error
        self.journal.replace(events)


_NOT_OURS = (KeyError, ValueError, TypeError, AttributeError)
"""What :meth:`bench.method.Stateful.apply` raises for an event of another method, or none."""


def _rebuild(state: Stateful, events: Iterable[StateEvent]) -> None:
    state.reset()
    for event in events:
        state.apply(event)


class BackgroundWork:
    """What a service does beside its requests, and what came of it.

    Attributes:
        finished: One JSON object per finished piece of work, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.finished: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, work: Background, context: _Context, telemetry: Telemetry) -> None:
        """Run ``work`` as a task of its own."""

        async def run() -> None:
            entry: dict[str, Any] = {"name": name, "request": context.request_id, "outcome": "ok"}
            try:
                entry["details"] = dict(await work(context))
            except asyncio.CancelledError:
                entry["outcome"] = "cancelled"
                raise
            except Exception as error:  # noqa: BLE001 - nobody else would hear of it
                if not isinstance(error, ReuseBenchError):
                    _LOG.error("background work (%s) failed for a reason of our own", name, exc_info=error)
                kind = error.kind if isinstance(error, EngineError) else type(error).__name__
                entry |= {"outcome": "error", "error": {"type": kind, "message": str(error)}}
            finally:
                entry |= {**_trace(context.trace), "finished_ns": time.monotonic_ns()}
                telemetry.count_calls(context.trace)
                self.finished.append(entry)

        task = asyncio.create_task(run(), name=f"background {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def running(self) -> int:
        """How many pieces of work are not finished."""
        return len(self._tasks)

    async def idle(self, timeout_s: float) -> None:
        """Wait until nothing runs, work that other work began included, or the time is over."""
        end = time.monotonic() + timeout_s
        while self._tasks and (left := end - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left)

    async def cancel(self) -> None:
        """Stop what runs, and wait until it has."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


class _Context:
    """:class:`bench.method.Context` for one request, or one piece of background work."""

    def __init__(self, service: Service, request_id: str, emit: Callable[[str], Any]) -> None:
        self.trace = Trace(received_ns=time.monotonic_ns())
        self.emit = emit
        self.request_id = request_id
        self._service = service

    def _client(self, role: Role) -> InstrumentedClient:
        service = self._service
        endpoint = service.endpoints.get(role)
        if endpoint is None or service.session is None:
            raise UsageError(f"{service.name} needs a {role} engine, and this service has none.")
        return InstrumentedClient(service.session, endpoint, role, self.trace, service.recording)

    @property
    def target(self) -> InstrumentedClient:
        return self._client("target")

    @property
    def small(self) -> InstrumentedClient:
        return self._client("small")

    def commit(self, event: StateEvent) -> None:
        state = self._service.state
        if state is None:
            raise TypeError(f"{self._service.name} commits state but is not Stateful")
        self._service.journal.append(self.request_id, event)
        state.apply(event)

    def background(self, name: str, work: Background) -> None:
        context = _Context(self._service, self.request_id, _ignore)
        self._service.background.start(name, work, context, self._service.telemetry)


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application around ``service``; its lifespan opens and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await service.close()

    app = FastAPI(title=f"ReuseBench: {service.name}", lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(BadRequest, _on_bad_request)
    app.add_exception_handler(404, _on_unknown_path)
    app.add_exception_handler(405, _on_unknown_path)
    app.add_exception_handler(Exception, _on_bug)

    def check_key(request: Request) -> None:
        if service.api_key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not secrets.compare_digest(given.encode(), service.api_key.encode()):
                raise BadRequest("a valid API key is needed (Authorization: Bearer …)", status=401)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        check_key(request)
        return await _chat(service, request)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        check_key(request)
        model = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "reusebench"}
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "method": service.name}

    @app.get("/metrics")
    async def metrics() -> Response:
        stats = service.state.stats() if service.state is not None else {}
        return PlainTextResponse(service.telemetry.render(stats), media_type=service.telemetry.content_type)

    @app.post("/admin/reset")
    async def reset(request: Request) -> dict[str, Any]:
        check_key(request)
        await service.reset()
        return {"reset": service.state is not None}

    @app.get("/admin/stats")
    async def stats(request: Request) -> dict[str, Any]:
        check_key(request)
        own = dict(service.state.stats()) if service.state is not None else {}
        return {
            "method": service.name,
            "requests": service.telemetry.summary(),
            "background": {
                "running": service.background.running,
                "finished": len(service.background.finished),
            },
            "state": own,
        }

    @app.get("/admin/background")
    async def background(request: Request, after: int = 0, wait_s: float = 0) -> dict[str, Any]:
        check_key(request)
        await service.background.idle(wait_s)
        return {"running": service.background.running, "finished": service.background.finished[after:]}

    @app.get("/admin/cache")
    async def get_cache(request: Request) -> dict[str, Any]:
        check_key(request)
        events = list(service.state.snapshot()) if service.state is not None else []
        shown = dict(service.method.describe()) if isinstance(service.method, Describable) else None
        return {"method": service.name, "state": shown, "events": events}

    @app.put("/admin/cache")
    async def put_cache(request: Request) -> dict[str, Any]:
        check_key(request)
        body = await _json_object(request)
        events = body.get("events")
        if body.get("method") != service.name:
            raise BadRequest(
                f"this state is of {body.get('method')!r}; this service runs {service.name!r}", param="method"
            )
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise BadRequest("`events` must be a list of objects, as GET /admin/cache gives", param="events")
        await service.replace_state(events)
        return {"events": len(events)}

    return app


async def _chat(service: Service, request: Request) -> Response:
    body = await _json_object(request)
    chat, options = parse_request(body, service.name)
    request_id = request.headers.get(REQUEST_HEADER) or uuid.uuid4().hex
    with_trace = TRACE_HEADER in request.headers
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    context = _Context(service, request_id, pieces.put if options.stream else _ignore)
    work = asyncio.create_task(_answer(service, chat, context))
    work.add_done_callback(lambda _: pieces.put_nowait(None))
    _end_with_client(request, work)
    try:
        first = await pieces.get()  # without a stream this is the end
    except asyncio.CancelledError:
        work.cancel()
        raise
    # Until something has been sent, a failure still gets its own HTTP status.
    if first is None and work.cancelled():
        return Response(status_code=_CLIENT_GONE)
    if first is None and (failed := work.exception()) is not None:
        return _Json(_failure(failed, context, with_trace), status_code=_status(failed))
    if not options.stream:
        reply = work.result()
        content = completion_body(
            request_id,
            chat.model,
            reply,
            usage_of(context.trace),
            options.stop,
            _extension(reply, context, with_trace),
        )
        return _Json(content, headers=_reply_headers(reply))
    streamed = Streamed(request_id, chat.model, options.include_usage, options.stop)

    async def chunks() -> AsyncIterator[str]:
        try:
            yield streamed.role()
            piece = first
            while piece is not None:
                if text := streamed.content(piece):
                    yield text
                piece = await pieces.get()
            if work.cancelled():
                return
            failed = work.exception()
            if failed is not None:
                yield streamed.error(_failure(failed, context, with_trace))
                return
            reply = work.result()
            extension = _extension(reply, context, with_trace)
            for text in streamed.finish(reply, usage_of(context.trace), extension):
                yield text
        finally:
            work.cancel()

    headers = _reply_headers(work.result()) if first is None else {}
    return StreamingResponse(chunks(), media_type="text/event-stream", headers=headers)


def _end_with_client(request: Request, work: asyncio.Task[Reply]) -> None:
    """Cancel ``work``, and with it the engine call, when the client hangs up."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watcher = asyncio.create_task(watch())
    work.add_done_callback(lambda _: watcher.cancel())


async def _answer(service: Service, chat: ChatRequest, context: _Context) -> Reply:
    """Run the method and count the outcome."""
    with service.telemetry.request(context.trace) as done:
        reply = await service.method.reply(chat, context)
        done(reply)
    return reply


async def _ignore(piece: str) -> None:
    """Take streamed text that nobody asked for."""


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _extension(reply: Reply, context: _Context, with_trace: bool) -> dict[str, Any]:
    extension: dict[str, Any] = {"cache": reply.cache.to_json()}
    if with_trace:
        extension |= {"details": dict(reply.details), **_trace(context.trace)}
    return extension


def _trace(trace: Trace) -> dict[str, Any]:
    return {
        "received_ns": trace.received_ns,
        "stages": [[stage.name, stage.started_ns, stage.finished_ns] for stage in trace.stages],
        "calls": [call.to_json() for call in trace.calls],
    }


def _reply_headers(reply: Reply) -> dict[str, str]:
    return {"x-reusebench-cache": reply.cache.kind}


def _failure(error: BaseException, context: _Context, with_trace: bool) -> dict[str, Any]:
    if not isinstance(error, ReuseBenchError):
        _LOG.error("a request failed for a reason of our own", exc_info=error)
    body = error_body(error)
    if with_trace:
        body["reusebench"] = _trace(context.trace)
    return body


def _status(error: BaseException) -> int:
    if isinstance(error, EngineRefused):
        # The engine refuses our key, not the client's: nothing that the client could mend.
        return 502 if error.status in (401, 403, 407) else error.status or 400
    if isinstance(error, EngineTimeout):
        return 504
    if isinstance(error, EngineError):
        return 429 if error.status == 429 else 502  # so that the client backs off
    return 400 if isinstance(error, UsageError) else 500


class _Json(JSONResponse):
    """JSON in ASCII: a model or client can send half a surrogate pair, which UTF-8 has no form for."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


async def _on_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return _Json(error.body(), status_code=error.status)


async def _on_unknown_path(request: Request, error: Exception) -> Response:
    text = f"{request.method} {request.url.path} is not served here"
    status = getattr(error, "status_code", 404)
    return _Json(BadRequest(text, status=status).body(), status_code=status)


async def _on_bug(request: Request, error: Exception) -> Response:
    # The server logs it, with where it came from; the client learns that it happened.
    return _Json(error_body(error), status_code=500)

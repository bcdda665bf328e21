"""A scripted engine: an OpenAI-compatible server without a model, for tests and for measuring ourselves.

A script (``script`` of the engine's configuration) is::

    {"rules": [{"match": "regex over the prompt's text", "reply": "...", ...}], "default": "OK"}

The first rule that matches and is not used up answers; where none does, ``default`` does. The keys of
a rule are the fields of :class:`~runners.engines.mock_script.Rule`. Tokens are words with the white
space before them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.config import EngineConfig, read_toml, validate
from bench.errors import EngineUnavailable, UsageError
from runners.engines.base import place
from runners.engines.mock_script import Rule, Script, Turn, prompt_text

__all__ = ["MockEngine", "MockServer"]

_LOG = logging.getLogger(__name__)


class MockServer:
    """The HTTP server; :class:`MockEngine` runs one in a thread, ``python -m`` one in a process."""

    def __init__(self, script: Script, model: str = "mock", *, keep: bool = True) -> None:
        """Take a script.

        Args:
            script: The behaviour.
            model: Model name that it goes by.
            keep: Whether to keep the bodies of requests.
        """
        self.script = script
        self.model = model
        self._keep = keep
        self._lock = threading.Lock()
        self._requests: list[dict[str, Any]] = []
        self._left = [rule.times for rule in script.rules]
        self._patterns = [re.compile(rule.match or "", re.DOTALL) for rule in script.rules]
        self._default = Rule(reply=script.default)
        self._last_prompt: list[str] = []
        self._runner: web.AppRunner | None = None
        self._served = 0

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Bodies of the chat requests so far, in order of arrival; safe from any thread."""
        with self._lock:
            return list(self._requests)

    async def listen(self, port: int = 0) -> int:
        """Serve on 127.0.0.1 and return the port; 0 takes a free one.

        Raises:
            OSError: The port is taken.
        """
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        # A stalled reply ends with its client, and does not hold up the end of the server (0 = no limit).
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, backlog=1024)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop serving; requests under way are dropped."""
        if self._runner is not None:
            await self._runner.cleanup()

    def forget(self) -> None:
        """Empty the prefix cache."""
        with self._lock:
            self._last_prompt = []

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if not self._allowed(request):
            return _error(401, "invalid API key")
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "reusebench"}
        return web.json_response({"object": "list", "data": [entry]})

    def _allowed(self, request: web.Request) -> bool:
        key = self.script.api_key
        return key is None or request.headers.get("Authorization") == f"Bearer {key}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if not self._allowed(request):
            return _error(401, "invalid API key")
        try:
            body = json.loads(await request.read())
            prompt = prompt_text(body["messages"])
        except (ValueError, KeyError, TypeError):
            return _error(400, "the body must be a JSON object with `messages`")
        turn = self._turn(body, prompt)
        rule = turn.rule
        if rule.delay_s:
            await asyncio.sleep(rule.delay_s)
        if rule.fault in ("400", "429", "500"):
            return _error(int(rule.fault), f"scripted {rule.fault}")
        if rule.fault == "disconnect":
            return _hang_up(request)
        return await (self._reply_stream(request, turn) if turn.stream else self._reply(request, turn))

    def _turn(self, body: dict[str, Any], prompt: str) -> Turn:
        with self._lock:
            self._served += 1
            if self._keep:
                self._requests.append(body)
            turn = Turn(body, prompt, self._rule(prompt))
            # As a server with one slot: what this prompt shares with the one before it.
            shared = 0
            for mine, before in zip(turn.prompt_tokens, self._last_prompt, strict=False):
                if mine != before:
                    break
                shared += 1
            turn.cached = min(shared, max(len(turn.prompt_tokens) - 1, 0))
            self._last_prompt = turn.prompt_tokens
            return turn

    def _rule(self, prompt: str) -> Rule:
        for index, rule in enumerate(self.script.rules):
            left = self._left[index]
            if left != 0 and self._patterns[index].search(prompt):
                self._left[index] = None if left is None else left - 1
                return rule
        return self._default

    async def _reply(self, request: web.Request, turn: Turn) -> web.StreamResponse:
        rule = turn.rule
        if rule.token_delay_s:
            await asyncio.sleep(rule.token_delay_s * len(turn.deltas))
        if rule.fault == "stall":
            await asyncio.Event().wait()
        if rule.fault == "error_event":
            return web.json_response(_error_body("scripted error", 500))
        message = {"role": "assistant", "content": turn.joined("content")}
        if rule.reasoning:
            message["reasoning_content"] = turn.joined("reasoning_content")
        choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}
        body = {**self._frame("chat.completion"), "choices": [choice], **turn.accounts}
        if rule.fault == "cut_stream":
            raw = json.dumps(body).encode()
            cut = web.StreamResponse(headers={"Content-Type": "application/json"})
            cut.content_length = len(raw)
            await cut.prepare(request)
            await cut.write(raw[: len(raw) // 2])
            return _hang_up(request, cut)
        return web.json_response(body)

    async def _reply_stream(self, request: web.Request, turn: Turn) -> web.StreamResponse:
        rule = turn.rule
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        frame = self._frame("chat.completion.chunk")
        if turn.with_usage:
            frame["usage"] = None

        def event(delta: dict[str, str], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return _event({**frame, "choices": [choice]})

        broken = rule.fault in ("cut_stream", "error_event", "stall")
        deltas = turn.deltas[: len(turn.deltas) // 2] if broken else turn.deltas
        events = [event({"role": "assistant", "content": ""})]
        for key, text in deltas:
            if rule.token_delay_s:
                await response.write(b"".join(events))
                events.clear()
                await asyncio.sleep(rule.token_delay_s)
            events.append(event({key: text}))
        if not broken:
            if rule.fault != "role_only":
                events.append(event({}, turn.finish_reason))
            if turn.with_usage:
                events.append(_event({**frame, "choices": [], **turn.accounts}))
            events.append(b"data: [DONE]\n\n")
        elif rule.fault == "error_event":
            events.append(_event(_error_body("scripted error", 500)))
        await response.write(b"".join(events))
        if rule.fault == "stall":
            await asyncio.Event().wait()
        if rule.fault == "cut_stream":
            return _hang_up(request, response)
        await response.write_eof()
        return response

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": f"mock-{self._served}", "object": kind, "created": 0, "model": self.model}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def _error_body(message: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "mock_error", "code": status}}


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "0"} if status == 429 else None
    return web.json_response(_error_body(message, status), status=status, headers=headers)


def _hang_up(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.close()  # what was written already still goes out
    return response or web.Response()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class MockEngine:
    """A :class:`MockServer` in a thread of this process.

    Attributes:
        model: The name it goes by: the configured one, or ``mock``.
    """

    def __init__(self, config: EngineConfig, role: str) -> None:
        """Check the script.

        Raises:
            UsageError: The script has an unknown key or a bad value.
        """
        self.config = config
        self.role = role
        self.model: str | None = config.model or "mock"
        self._script = validate(Script, config.script, f"{place(role)}.script")
        self._server = MockServer(self._script, self.model)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Bodies of the chat requests so far, in order of arrival; safe from any thread."""
        return self._server.requests

    async def start(self, log_dir: Path) -> str:
        """Start serving and return the base URL."""
        del log_dir  # nothing to log: `requests` has it all
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mock-engine", daemon=True)
        self._thread.start()
        try:
            port = await self._there(self._loop, self._server.listen())
        except OSError as error:
            await self.stop()
            raise EngineUnavailable(f"The mock {self.role} engine can't listen: {error}.") from error
        return f"http://127.0.0.1:{port}/v1"

    @staticmethod
    async def _there(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    async def probe(self) -> dict[str, Any]:
        """Return facts for ``run.json``."""
        return {"kind": "mock", "model": self.model, "rules": len(self._script.rules)}

    async def reset_cache(self) -> bool:
        """Empty the pretended prefix cache."""
        self._server.forget()
        return True

    async def stop(self) -> None:
        """Stop serving."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        await self._there(loop, self._server.close())
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()


async def _serve(server: MockServer, port: int) -> None:
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    found = await server.listen(port)
    _LOG.info("http://127.0.0.1:%d/v1", found)
    await done.wait()
    await server.close()


def main() -> None:
    """Serve in a process of its own: ``python -m runners.engines.mock --port P --script FILE``."""
    parser = argparse.ArgumentParser(prog="python -m runners.engines.mock", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--script", type=Path, help="a TOML or JSON file")
    parser.add_argument("--model", default="mock", help="model name that it goes by")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        script = validate(Script, _read_script(args.script), str(args.script))
    except UsageError as error:
        parser.error(str(error))
    with contextlib.closing(_new_loop()) as loop:
        loop.run_until_complete(_serve(MockServer(script, args.model, keep=False), args.port))


def _read_script(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    if file.suffix == ".toml":
        return read_toml(file)
    try:
        script: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"Can't read {file}: {error}.") from error
    return script


if __name__ == "__main__":
    main()

"""The embedded engine: llama.cpp in a process of its own, watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp

from bench.config import EngineConfig
from bench.errors import EngineUnavailable, UsageError
from runners import models
from runners.engines.base import place
from runners.engines.control import Answer, request

__all__ = ["LlamaCppEngine", "default_threads"]

_LOG = logging.getLogger(__name__)
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError)
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class LlamaCppEngine:
    """A model of the store behind llama.cpp's own HTTP server.

    The server's process ends with this one, however this one ends. Where the process dies, or stops
    answering, it is started again on the same port.

    Attributes:
        model: The model's name in the store.
    """

    LOAD_S = 180.0
    """Limit for loading the model, seconds."""
    HANG_S = 60.0
    """A server that answers no health check for that long is killed and started again, seconds."""
    CHECK_S = 5.0
    """Time between health checks, and the limit for one, seconds."""
    MAX_RESTARTS = 3
    """Restarts within RESTART_WINDOW_S; one more failure, and the engine stays down."""
    RESTART_WINDOW_S = 600.0

    def __init__(self, config: EngineConfig, role: str) -> None:
        """Check the configuration.

        Raises:
            UsageError: The model is not named, or not one of the store's.
        """
        if config.model is None:
            raise UsageError(f"{place(role)}.model is missing: name one of the store's models ({_known()}).")
        self.config = config
        self.role = role
        self.model: str | None = config.model
        self._file = _language_model(config.model, f"{place(role)}.model")
        self._drafter = _language_model(config.drafter, f"{place(role)}.drafter") if config.drafter else None
        self._path: Path | None = None
        self._drafter_path: Path | None = None
        self._log: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._root = ""
        self._restarts: deque[float] = deque()
        self._restart_count = 0
        self._failure: str | None = None
        self._state = "down"
        self._meta: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the server; None where there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self, log_dir: Path) -> str:
        """Load the model, warm it up, and return the base URL.

        Raises:
            ModelMissing: The model's file is absent or damaged.
            EngineUnavailable: The server did not come up; the message has the end of its log.
        """
        if self._process is not None:
            raise RuntimeError("the engine was started already")
        self._path = await asyncio.to_thread(models.path, self._file.name)
        if self._drafter is not None:
            self._drafter_path = await asyncio.to_thread(models.path, self._drafter.name)
        self._log = log_dir / f"{self.role}.log"
        try:
            self._root = await self._spawn(port=0)
            await self._warm_up()
        except BaseException:
            await self.stop()
            raise
        self._state = "up"
        self._watch = asyncio.create_task(self._supervise(), name=f"watch-{self.role}-engine")
        return f"{self._root}/v1"

    async def _spawn(self, port: int) -> str:
        """Start the process and return the server's root URL once it has loaded the model."""
        assert self._log is not None
        settings = {
            "parent": os.getpid(),
            "path": str(self._path),
            "model": self.model,
            "port": port,
            "context": self.config.context,
            "slots": self.config.slots,
            "threads": self.config.threads or default_threads(),
            "slot_folder": f"{self._log.parent}{os.sep}",
            "nice": self.config.nice,
            "drafter": None if self._drafter is None else str(self._drafter_path),
            "draft_max": self.config.draft_max,
        }
        paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log.open("ab") as log:
            # From the event loop's own thread: on Linux the child dies with the thread that started it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runners.engines.llamacpp_server", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle, not the server's
            )
        process = self._process
        assert process.stdout is not None
        began = time.monotonic()
        reading = asyncio.create_task(asyncio.to_thread(process.stdout.readline))
        try:
            line = await asyncio.wait_for(asyncio.shield(reading), self.LOAD_S)
        except TimeoutError:
            raise EngineUnavailable(
                f"The {self.role} engine ({self.model}) did not load within {self.LOAD_S:.0f} s."
                + self._log_end()
            ) from None
        finally:
            if not reading.done():
                process.kill()  # which ends the thread's read
                await reading
        if not line:
            code = await asyncio.to_thread(process.wait)
            raise EngineUnavailable(
                f"The {self.role} engine ({self.model}) ended while it loaded (exit code {code})."
                + self._log_end()
            )
        root = str(json.loads(line)["url"]).rstrip("/")
        while not await self._healthy(root):
            if process.poll() is not None or time.monotonic() - began > self.LOAD_S:
                raise EngineUnavailable(
                    f"The {self.role} engine ({self.model}) loaded, but does not answer.{self._log_end()}"
                )
            await asyncio.sleep(0.1)
        return root

    async def _healthy(self, root: str) -> bool:
        try:
            return (await request("GET", f"{root}/health", timeout_s=self.CHECK_S)).status == 200
        except _NO_ANSWER:
            return False

    async def _warm_up(self) -> None:
        """Generate one token, so that no measured request pays for page faults and templates."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
        answer = await self._ask("POST", "/v1/chat/completions", body, timeout_s=self.LOAD_S)
        if answer.status != 200:
            raise EngineUnavailable(
                f"The {self.role} engine ({self.model}) can't answer: {answer.said}.{self._log_end()}"
            )
        listed = await self._ask("GET", "/v1/models")
        self._meta = listed.body["data"][0].get("meta", {})
        await self._erase()

    async def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Answer:
        try:
            return await request(method, self._root + path, body=body, timeout_s=timeout_s)
        except _NO_ANSWER as error:
            why = self._failure or str(error) or "no answer in time"
            raise EngineUnavailable(
                f"The {self.role} engine ({self.model}) does not answer: {why}.{self._log_end()}"
            ) from error

    async def _erase(self) -> None:
        # A slot at work is erased when it is done, so give that time.
        for slot in range(self.config.slots):
            answer = await self._ask("POST", f"/slots/{slot}?action=erase", {}, self.config.timeout_s)
            if answer.status != 200:
                raise EngineUnavailable(
                    f"The {self.role} engine ({self.model}) can't clear its cache: {answer.said}."
                )

    async def _supervise(self) -> None:
        """Start the server again whenever it dies or hangs, until it does so too often."""
        last_answer = time.monotonic()
        next_check = last_answer + self.CHECK_S
        while self._process is not None:
            await asyncio.sleep(0.1)
            code = self._process.poll()
            if code is None and time.monotonic() < next_check:
                continue
            if code is None and await self._healthy(self._root):
                last_answer = time.monotonic()
            next_check = time.monotonic() + self.CHECK_S
            if code is None and time.monotonic() - last_answer < self.HANG_S:
                continue
            if code is None:
                self._process.kill()  # what hangs won't end when asked to
            why = f"did not answer for {self.HANG_S:.0f} s" if code is None else f"ended (exit code {code})"
            if not await self._restart(why):
                return
            last_answer = time.monotonic()

    async def _restart(self, why: str) -> bool:
        """Start the server again on its port; False where it must stay down."""
        port = int(self._root.rsplit(":", 1)[1])
        self._state = "restarting"
        while True:
            await self._end_process()
            now = time.monotonic()
            while self._restarts and now - self._restarts[0] > self.RESTART_WINDOW_S:
                self._restarts.popleft()
            if len(self._restarts) >= self.MAX_RESTARTS:
                self._failure = f"it {why}, and was started again {self.MAX_RESTARTS} times before"
                self._state = "down"
                _LOG.error("The %s engine stays down: %s. Its log: %s", self.role, self._failure, self._log)
                return False
            _LOG.warning("The %s engine %s; starting it again. Its log: %s", self.role, why, self._log)
            await asyncio.sleep(0.2 * 4 ** len(self._restarts))  # 0.2, 0.8, 3.2 s
            self._restarts.append(now)
            self._restart_count += 1
            try:
                await self._spawn(port)
                await self._warm_up()
            except EngineUnavailable as error:
                why = f"did not come up again ({str(error).splitlines()[0]})"
                continue
            self._state = "up"
            return True

    async def probe(self) -> dict[str, Any]:
        """Return facts for ``run.json``; ``context`` is per slot, in tokens, as the server has it.

        ``state`` is ``up``, ``restarting`` or ``down``; ``failure`` says why it stays down.
        """
        speculative = (
            {}
            if self._drafter is None
            else {
                "drafter": self._drafter.name,
                "drafter_file": self._drafter.file,
                "drafter_sha256": self._drafter.sha256,
                "draft_max": self.config.draft_max,
            }
        )
        return {
            **speculative,
            "kind": "llamacpp",
            "model": self.model,
            "file": self._file.file,
            "bytes": self._file.bytes,
            "sha256": self._file.sha256,
            "version": f"xllamacpp {version('xllamacpp')}",
            "threads": self.config.threads or default_threads(),
            "context": self._meta.get("n_ctx", self.config.context),
            "slots": self.config.slots,
            "nice": self.config.nice,
            "n_params": self._meta.get("n_params"),
            "quantization": self._meta.get("ftype"),
            "state": self._state,
            "restarts": self._restart_count,
            "failure": self._failure,
        }

    async def reset_cache(self) -> bool:
        """Erase every slot's cached prompt.

        Raises:
            EngineUnavailable: The server does not answer.
        """
        await self._erase()
        return True

    async def stop(self) -> None:
        """End the server's process and stop watching it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await self._end_process()
        self._state = "down"

    async def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None  # last: a cancelled end is taken up again by stop()

    def _log_end(self) -> str:
        """Return the last lines of the log, for the end of a message."""
        if self._log is None or not self._log.exists():
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
        return "".join(f"\n  | {line}" for line in lines) + f"\nThe whole log: {self._log}"


def default_threads() -> int:
    """Return the number of cores that this process may use: affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or a quota of "max"
        return cores


def _known() -> str:
    return ", ".join(name for name, file in models.catalogue().items() if file.role != "encoder")


def _language_model(name: str, where: str) -> models.ModelFile:
    file = models.model_file(name)
    if file.role == "encoder":
        raise UsageError(f"{where}: {name} is a sentence encoder's file; name a language model ({_known()}).")
    return file

"""A service in a child process, as the runner drives it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import aiohttp

from bench.config import Cell
from bench.engine import Role
from bench.errors import EngineUnavailable
from runners.client import Endpoint
from runners.serve import child_command, child_spec, free_socket

__all__ = ["ServiceProcess"]

_START_S = 60.0


class ServiceProcess:
    """Starts, watches and stops one service.

    Attributes:
        url: Base URL up to and including ``/v1``.
    """

    def __init__(
        self,
        cell: Cell,
        endpoints: Mapping[Role, Endpoint],
        state: Path,
        log: Path,
        calls: Path | None = None,
    ) -> None:
        self.url = ""
        self._calls = calls
        self._cell = cell
        self._endpoints = endpoints
        self._state = state
        self._log_path = log
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            EngineUnavailable: It ended or did not answer; the message has the end of its log.
        """
        cell = self._cell
        spec = self._state.with_suffix(".service.json")
        text = child_spec(
            cell.method, cell.method_config, cell.workload, self._endpoints, self._state, self._calls
        )
        spec.write_text(text, encoding="utf-8")
        self._log = self._log_path.open("ab")
        with free_socket() as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
            self._process = subprocess.Popen(
                child_command(spec, sock),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(sock.fileno(),),
                start_new_session=True,  # Ctrl-C reaches us alone; we stop the service in order
                env=_environment(),
            )
        await self._wait_healthy()

    async def _wait_healthy(self) -> None:
        deadline = time.monotonic() + _START_S
        health = self.url.removesuffix("/v1") + "/health"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while self.alive and time.monotonic() < deadline:
                try:
                    async with session.get(health) as reply:
                        if reply.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not yet
                await asyncio.sleep(0.02)
        tail = self._log_path.read_text(encoding="utf-8", errors="replace")[-1500:]
        await self.stop()
        raise EngineUnavailable(
            f"The service of {self._cell.id} did not start. The end of {self._log_path}:\n{tail}"
        )

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop the process, by force ``at_once`` or after ten seconds. Safe to call twice."""
        if self._process is not None:
            if self.alive and not at_once:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._process.wait, 10)
            if self.alive:
                self._process.kill()
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


def _environment() -> dict[str, str]:
    """The child finds our packages also where they are not installed (a checkout)."""
    root = str(Path(__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}

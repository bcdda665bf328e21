"""The isolated executor: runs model-written Python, hostile until proven otherwise, one process per program.

A zygote (:mod:`methods.execution.zygote`), started with an empty environment and none of this process's
memory or descriptors, forks a confined child for every program. The layers, each used where the system has
it (:meth:`IsolatedExecutor.layers` names those in use):

``namespaces``
    Own processes, network (without even a loopback that is up), IPC and host name. The end of the zygote is
    the end of every program.
``no-capabilities``
    No privilege, even for root, and none to be gained; no core dumps, no reading of its memory by others.
``landlock``
    Files: reading of Python's own library, and nothing else. There is no folder to write to.
``seccomp``
    Only the system calls that a single-threaded interpreter needs: no processes, threads, signals to others,
    sockets, tracing or changes to files. Without Landlock no file can be opened at all, the library included.
``rlimits``
    Address space, processor time, bytes written, descriptors. Wall-clock time is enforced from here.

This is isolation by the kernel of the machine, no virtual machine. It does not stop:

* a bug in the kernel, or in a system call that the interpreter needs;
* side channels: timing, load, caches. Programs compete for processors and memory bandwidth with all else;
* looking at the metadata of files (whether a path exists, its size) on Linux, as no layer covers ``stat``;
* a program that forges its *own* result: it can find the descriptor and write what it likes. What comes back
  is decoded as bounded JSON and checked, and no program can reach another one's files or the zygote;
* without seccomp: most of the above; outside Linux: anything but time and output. There, run only programs
  that you trust.

``stdin`` is empty. A program starts with ``random.seed(0)`` and a fixed hash seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from bench.execution import ProgramResult, ProgramStatus
from methods.execution import wire
from methods.execution.wire import Limits

__all__ = ["IsolatedExecutor"]

_START_S = 20.0  # a cold interpreter on a loaded machine
_GRACE_S = 2.0  # for the zygote to report a kill, or to end
_POLL_S = 0.002

_FROM_PROGRAM = frozenset(
    {
        "ok",
        "syntax_error",
        "error",
        "exit",
        "no_value",
        "result_too_large",
        "memory_limit",
        "output_limit",
        "refused",
    }
)
"""The statuses that a program's own process can report; the others are seen from outside."""


class IsolatedExecutor:
    """Runs programs in isolation, several at once; a :class:`bench.execution.ProgramExecutor`.

    Belongs to the event loop that first uses it. Starts nothing before the first program.
    """

    def __init__(self, limits: Limits | None = None, *, concurrency: int = 4) -> None:
        """Prepare; costs nothing.

        Args:
            limits: What each program may use.
            concurrency: Programs at once, at least 1. More wait, and their wait does not count as theirs.

        Raises:
            ValueError: ``concurrency`` is below 1.
        """
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self._limits = limits or Limits()
        self._slots = asyncio.Semaphore(concurrency)
        self._starting = asyncio.Lock()
        self._zygote: _Zygote | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the zygote if it does not run; :meth:`run` does so by itself.

        Raises:
            OSError: The zygote could not be started, or did not come up in time.
            RuntimeError: The executor is closed.
        """
        await self._ready()

    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers of isolation in use; empty before the first start."""
        return self._zygote.layers if self._zygote is not None else ()

    async def run(self, code: str, *, arguments: dict[str, object] | None = None) -> ProgramResult:
        """Run ``code`` in a fresh confined process and return how it ended.

        The value's tuples come back as lists, its keys as strings, Decimal and Fraction as int or float.

        Args:
            code: Python source. Its value is what ``solve(**arguments)`` returns if it defines ``solve``
                (left out if ``solve`` needs arguments and there are none), or ``answer``, or the last
                printed line, as a string.
            arguments: Keyword arguments for ``solve``; JSON-serialisable.

        Raises:
            TypeError, ValueError: ``arguments`` is not JSON-serialisable.
            RuntimeError: The executor is closed.
        """
        request = json.dumps({"code": code, "arguments": arguments}).encode()
        began = time.perf_counter_ns()
        async with self._slots:
            # Once more for a program that a dying zygote took over but provably did not start.
            for _ in range(2):
                try:
                    zygote = await self._ready()
                except OSError as error:
                    return _result("executor_error", began, error=f"the executor did not start: {error}")
                began = time.perf_counter_ns()
                try:
                    result = await zygote.run(request)
                except OSError as error:
                    return _result("executor_error", began, error=f"the program was not handed over: {error}")
                if result is not None:
                    return result
        return _result("executor_error", began, error="the executor ended twice before the program started")

    async def close(self) -> None:
        """Stop every process that belongs to the executor; programs in flight end as executor_error."""
        self._closed = True
        async with self._starting:
            if self._zygote is not None:
                await self._zygote.stop()

    async def _ready(self) -> _Zygote:
        async with self._starting:
            if self._closed:
                raise RuntimeError("the executor is closed")
            if self._zygote is None or self._zygote.lost:
                if self._zygote is not None:
                    await self._zygote.stop()
                self._zygote = _Zygote(self._limits)
                await self._zygote.greeted()
            return self._zygote


class _Job:
    """One program in flight: its files (request, result, stdout, stderr) and the wait status to come."""

    def __init__(self) -> None:
        self.began = time.perf_counter_ns()
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.expired = False
        self.files: list[int] = []

    def end(self, status: int | None) -> None:
        """Settle the future: a wait status, or None where the zygote is lost."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.ended.done():  # it is where the waiting task was cancelled
            self.ended.set_result(status)


class _Zygote:
    """A running zygote and its programs. One that is ``lost`` takes no more of them; it needs stop()."""

    def __init__(self, limits: Limits) -> None:
        self.lost = False
        self.layers: tuple[str, ...] = ()
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._jobs: dict[int, _Job] = {}
        self._count = 0
        self._control, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(theirs.fileno(), limits)
            except OSError:
                self._control.close()
                raise
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._receive)

    async def greeted(self) -> None:
        """Wait until the zygote is up; OSError if it is not in time."""
        try:
            await asyncio.wait_for(asyncio.shield(self._hello), _START_S)
        except TimeoutError:
            self._hung()
            raise
        if self.lost:
            raise ConnectionError("the zygote ended at once")

    async def run(self, request: bytes) -> ProgramResult | None:
        """Run one program; None if it provably never started because the zygote was lost."""
        job = _Job()
        self._count += 1
        number = self._count
        try:
            for _ in range(4):
                job.files.append(_anonymous_file())
            with open(job.files[0], "wb", closefd=False) as file:  # noqa: PTH123 - a descriptor
                file.write(request)
            try:
                socket.send_fds(self._control, [wire.RECORD.pack(wire.RUN, number, 0)], job.files)
            except OSError:
                self._lose()
                return None
            self._jobs[number] = job
            job.timer = self._loop.call_later(self._limits.wall_s, self._expire, number, job)
            try:
                status = await job.ended
            except asyncio.CancelledError:
                self._kill(number, job)
                raise
            return self._judge(job, status)
        finally:
            for descriptor in job.files:
                os.close(descriptor)

    async def stop(self) -> None:
        """End the zygote and every program, and wait until they are gone. May be called again."""
        self._lose()
        for force in (None, signal.SIGTERM, signal.SIGKILL):  # it ends with its socket, unless it hangs
            if force is not None:
                self._process.send_signal(force)
            until = self._loop.time() + _GRACE_S
            while self._process.poll() is None and self._loop.time() < until:
                await asyncio.sleep(_POLL_S)

    def _expire(self, number: int, job: _Job) -> None:
        job.expired = True
        self._kill(number, job)

    def _kill(self, number: int, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
        if self.lost or number not in self._jobs:
            return
        try:
            self._control.send(wire.RECORD.pack(wire.KILL, number, 0))
        except OSError:
            self._lose()
            return
        job.timer = self._loop.call_later(_GRACE_S, self._hung)

    def _receive(self) -> None:
        try:
            data = self._control.recv(wire.RECORD.size * 64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(data) % wire.RECORD.size:
            self._lose()
            return
        for kind, number, detail in wire.RECORD.iter_unpack(data):
            if kind == wire.HELLO:
                self.layers = tuple(name for bit, name in enumerate(wire.LAYERS) if detail >> bit & 1)
                if not self._hello.done():
                    self._hello.set_result(None)
            elif number in self._jobs:
                self._jobs.pop(number).end(detail)

    def _hung(self) -> None:
        self._process.terminate()
        self._lose()

    def _lose(self) -> None:
        """Let go of the zygote and its programs; closing the socket ends them."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._control)
        self._control.close()
        if not self._hello.done():
            self._hello.set_result(None)
        for job in self._jobs.values():
            job.end(None)
        self._jobs.clear()

    def _judge(self, job: _Job, status: int | None) -> ProgramResult | None:
        limits = self._limits
        _, result_file, out_file, error_file = job.files
        record = os.pread(result_file, wire.result_file_bytes(limits) + 1, 0)
        out = os.pread(out_file, limits.output_bytes + 1, 0)
        stdout = out[: limits.output_bytes].decode("utf-8", "replace")

        def ended(kind: ProgramStatus, error: str | None) -> ProgramResult:
            return _result(kind, job.began, error=error, stdout=stdout)

        started = record.startswith(wire.STARTED)
        if status is None:
            # Running it twice is harmless as such: a program has no effects.
            return ended("executor_error", "the executor ended during the program") if started else None
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXFSZ or max(len(out), os.fstat(error_file).st_size) > limits.output_bytes:
            return ended("output_limit", f"it wrote more than {limits.output_bytes} bytes")
        if code == -signal.SIGXCPU:
            return ended("timeout", f"it used more than {limits.cpu_s} s of processor time")
        if code == -signal.SIGSYS:
            return ended("refused", "it made a foreign system call")
        if code == -signal.SIGKILL and job.expired:
            return ended("timeout", f"it ran longer than {limits.wall_s:g} s")
        if code < 0:
            return ended("crashed", f"it died of {_signal_name(-code)}")
        if not started:
            return ended("executor_error", "the process could not be confined, so the program was not run")
        if record == wire.STARTED:
            return ended("exit", "it ended its process without a value")
        reported, error, value = _reported(record, stdout, limits)
        return _result(reported, job.began, error=error, value=value, stdout=stdout)


def _reported(record: bytes, stdout: str, limits: Limits) -> tuple[ProgramStatus, str | None, object]:
    """Turn what the program's process wrote, which may be anything, into status, error and value."""
    try:
        report = json.loads(record)
        kind, error, value = report["status"], report.get("error"), report.get("value")
        if kind not in _FROM_PROGRAM or not isinstance(error, str | None):
            raise ValueError("not a report")
        if _depth(value) > limits.result_depth or len(record) > wire.result_file_bytes(limits):
            raise ValueError("not within limits")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "error", "it wrote over its own result", None
    if kind == "no_value" and stdout.strip():
        last = stdout.strip().splitlines()[-1].strip()
        if len(last.encode()) > limits.result_bytes:
            return "result_too_large", "the last printed line is too long", None
        return "ok", None, last
    return cast(ProgramStatus, kind), error, value if kind == "ok" else None


def _depth(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _result(
    status: ProgramStatus, began: int, *, error: str | None, value: object = None, stdout: str = ""
) -> ProgramResult:
    return ProgramResult(status, value, stdout, error, time.perf_counter_ns() - began)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _anonymous_file() -> int:
    """Return the descriptor of an empty file that has no name and ends with its last descriptor."""
    if sys.platform == "linux":
        return os.memfd_create("program")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _start(control: int, limits: Limits) -> subprocess.Popen[bytes]:
    """Start the zygote: no environment but the hash seed, no site packages, no descriptor but its socket."""
    script = str(Path(__file__).resolve().with_name("zygote.py"))
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8"]
        + [script, str(control), json.dumps(asdict(limits))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PYTHONHASHSEED": "0"},
        pass_fds=[control],
        start_new_session=True,  # an interrupt from the keyboard is for the benchmark to handle
    )

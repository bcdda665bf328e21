"""The zygote: a bare interpreter that forks one fresh, confined process per program.

Run by path, never imported: ``python zygote.py CONTROL LIMITS``, where CONTROL is the descriptor of a stream
socket and LIMITS the JSON of :class:`wire.Limits`. It is two processes. The outer one enters new namespaces
and then only waits; the inner one is the first process of them, so that its end, for whatever reason, is the
end of every program. It ends when the control socket does, and on the death of its parent.

A program's four descriptors come with the request: its JSON, and files for the result, standard output and
standard error. The zygote reads none of them; what a program writes is for the executor to judge.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from methods.execution import confine, program, wire
else:  # by path, and out of the path again: programs find the standard library there and nothing else
    _FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path.insert(0, _FOLDER)
    import confine
    import program
    import wire

    sys.path.remove(_FOLDER)


def main() -> NoReturn:
    """Serve until the control socket ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    limits = wire.Limits(**json.loads(sys.argv[2]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
        score.write("1000")  # where memory runs out, programs go before the benchmark does
    namespaces = confine.enter_namespaces()
    confine.die_with_parent()
    inner = os.fork()
    if inner:
        control.close()
        _wait(inner)
    confine.die_with_parent()
    _Zygote(control, limits, namespaces).serve()


def _wait(inner: int) -> NoReturn:
    def stop(_number: int, _frame: FrameType | None) -> None:
        os.kill(inner, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    os.waitpid(inner, 0)
    os._exit(0)


class _Zygote:
    def __init__(self, control: socket.socket, limits: wire.Limits, namespaces: bool) -> None:
        self._control = control
        self._limits = limits
        self._running: dict[int, int] = {}  # process -> program number
        program.preload()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a kill then loses nothing
        dropped = confine.drop_capabilities()
        landlock = confine.restrict_files([path for path in sys.path if os.path.exists(path)])  # noqa: PTH110
        self._filter = self._working_filter(may_open=landlock)
        gc.collect()
        gc.freeze()  # a collection in a child would otherwise copy every page that holds an object
        active = (namespaces, dropped, landlock, self._filter is not None, True)
        self._send(wire.HELLO, 0, sum(on << index for index, on in enumerate(active)))

    def serve(self) -> NoReturn:
        """Start, kill and reap programs as they come."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == wake:
                    os.read(wake, 4096)
                    self._reap()
                else:
                    self._obey()

    def _obey(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._control, wire.RECORD.size, 4)
        if len(message) < wire.RECORD.size:
            self._end()
        kind, number, _ = wire.RECORD.unpack(message)
        if kind == wire.RUN:
            process = os.fork()
            if not process:
                self._become(descriptors)
            self._running[process] = number
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            for process, running in self._running.items():
                if running == number:  # not reaped yet, so the process number is still its own
                    os.kill(process, signal.SIGKILL)

    def _reap(self) -> None:
        while self._running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            self._send(wire.EXIT, self._running.pop(process), status)

    def _send(self, kind: int, number: int, detail: int) -> None:
        try:
            self._control.sendall(wire.RECORD.pack(kind, number, detail))
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        for process in self._running:  # for where no namespace does it
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os._exit(0)

    def _become(self, descriptors: list[int]) -> NoReturn:
        """Turn this process, just forked, into the program's."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # over the cap on a file, the kernel kills
            confine.die_with_parent()
            request, result, out, err = descriptors
            text = os.pread(request, os.fstat(request).st_size, 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.dup2(result, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            limits = self._limits
            confine.limit_resources(
                cpu_s=limits.cpu_s,
                memory_bytes=limits.memory_bytes,
                file_bytes=max(limits.output_bytes, wire.result_file_bytes(limits)),
                open_files=limits.open_files,
            )
            if self._filter is None or confine.install_filter(self._filter):
                os.write(3, wire.STARTED)
                program.run(text, 3, limits)
        finally:
            os._exit(0)  # also where it raised: without a result, the executor knows

    def _working_filter(self, *, may_open: bool) -> bytes | None:
        code = confine.filter_program(may_open=may_open)
        process = os.fork()
        if not process:
            os._exit(0 if code is not None and confine.install_filter(code) else 1)
        return code if os.waitpid(process, 0)[1] == 0 else None


if __name__ == "__main__":
    main()

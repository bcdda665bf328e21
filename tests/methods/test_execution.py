"""The isolated executor: what programs give, what they are denied, and that it outlives all of them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.execution import ProgramExecutor, ProgramResult
from methods.execution import LAYERS, IsolatedExecutor, Limits

ROOT = Path(__file__).parents[2]
LINUX = sys.platform == "linux"
LIMITS = Limits(wall_s=1.5, cpu_s=3)

isolating = pytest.mark.skipif(not LINUX, reason="isolation needs Linux")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[IsolatedExecutor]:
    """One executor for all the programs that must not harm it."""
    async with IsolatedExecutor(LIMITS, concurrency=3) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="function")
async def executor() -> AsyncIterator[IsolatedExecutor]:
    async with IsolatedExecutor(LIMITS, concurrency=3) as made:
        yield made


def _processes(field: str, value: int) -> set[int]:
    """Every process, zombies included, whose status has ``value`` as ``field``."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue
        if any(line.split()[:2] == [field, str(value)] for line in lines):
            found.add(int(status.parent.name))
    return found


def _descendants(process: int) -> set[int]:
    children = _processes("PPid:", process)
    return children.union(*(_descendants(child) for child in children))


def _zygote(executor: IsolatedExecutor) -> tuple[int, int]:
    """Its outer process and its inner one, which programs are children of."""
    assert executor._zygote is not None
    outer = executor._zygote._process.pid
    (inner,) = _processes("PPid:", outer)
    return outer, inner


async def _started(executor: IsolatedExecutor) -> int:
    """The process of the one program in flight, once it runs."""
    await executor.start()
    while not (programs := _processes("PPid:", _zygote(executor)[1])):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    return programs.pop()


async def _gone(processes: set[int]) -> bool:
    for _ in range(300):
        if not any(Path(f"/proc/{process}").exists() for process in processes):
            return True
        await asyncio.sleep(0.01)
    return False


# Values


VALUES: list[tuple[str, object]] = [
    ("answer = 6 * 7", 42),
    ("answer = 1.05 ** 360", 1.05**360),
    ("answer = None", None),
    ("answer = True", True),
    ("answer = 'ä'", "ä"),
    ("answer = '\\ud800'", "\ud800"),
    ("answer = (1, [2.5, {'a': None, 3: 'b'}])", [1, [2.5, {"a": None, "3": "b"}]]),
    ("from decimal import Decimal\nanswer = Decimal('2.50')", 2.5),
    ("from decimal import Decimal\nanswer = Decimal('3.00')", 3),
    ("from fractions import Fraction\nanswer = [Fraction(1, 4), Fraction(8, 2)]", [0.25, 4]),
    ("answer = 10 ** 300", 10**300),
    ("answer = -float('inf')", -math.inf),
    ("import enum\nclass E(enum.IntEnum):\n    A = 3\nanswer = E.A", 3),
    # The order: solve, answer, the last printed line.
    ("def solve():\n    return 1\nanswer = 2\nprint(3)", 1),
    ("def solve(x=4):\n    return x\nanswer = 2", 4),
    ("def solve(x):\n    return x\nanswer = 2", 2),
    ("answer = 2\nprint(3)", 2),
    ("print(3)\nprint(' 4.50 ')\nprint()", "4.50"),
    ("solve = 5\nprint(6)", "6"),
    # One namespace.
    ("def f(n):\n    return n * f(n - 1) if n else 1\nanswer = [f(k) for k in range(4)]", [1, 1, 2, 6]),
    ("k = 2\nanswer = sum(k * i for i in range(4))", 12),
    ("answer = __name__", "__main__"),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nanswer = A().x", 1),
]


async def test_values(executor: IsolatedExecutor) -> None:
    for code, value in VALUES:
        result = await executor.run(code)
        assert (result.status, result.value, result.error) == ("ok", value, None), code
        assert type(result.value) is type(value), code
        assert result.wall_ns > 0


@isolating
async def test_the_library_is_readable(executor: IsolatedExecutor) -> None:
    await executor.start()
    if "landlock" not in executor.layers():
        pytest.skip("without Landlock, programs open no file at all")
    assert (await executor.run("import colorsys\nanswer = colorsys.ONE_SIXTH")).value == 1 / 6


async def test_nan_is_a_number(executor: IsolatedExecutor) -> None:
    value = (await executor.run("answer = float('nan')")).value
    assert isinstance(value, float)
    assert math.isnan(value)


async def test_arguments(executor: IsolatedExecutor) -> None:
    runner: ProgramExecutor = executor
    code = "def solve(x, y=1):\n    return [x, y]"
    assert (await runner.run(code, arguments={"x": "ä"})).value == ["ä", 1]
    assert (await runner.run(code, arguments={"z": 1})).status == "error"
    assert (await runner.run(code, arguments={})).status == "no_value"
    big = "x" * 3_000_000
    assert (await runner.run("def solve(x):\n    return len(x)", arguments={"x": big})).value == len(big)


async def test_programs_are_repeatable_and_share_nothing(executor: IsolatedExecutor) -> None:
    code = "import random\nanswer = [random.random(), hash('a'), list({'a', 'b', 'c'})]"
    first, second = await executor.run(code), await executor.run(code)
    assert first.status == "ok"
    assert first.value == second.value
    await executor.run("import math, builtins\nmath.pi = 3\nbuiltins.len = None\nx = 1")
    assert (await executor.run("import math\nanswer = math.pi + len('a')")).value == math.pi + 1
    assert (await executor.run("answer = x")).status == "error"


# Other ends


ENDS = [
    ("x = 1\nx = = 2", "syntax_error", "SyntaxError: invalid syntax (line 2)"),
    ("def f():\nreturn 1", "syntax_error", "line 2"),
    ("x = '\0'", "syntax_error", "null bytes"),
    ("x = '\ud800'", "syntax_error", "surrogates"),
    ("a = 1\nb = 0\nanswer = a / b", "error", "ZeroDivisionError: division by zero (line 3)"),
    ("def solve():\n    raise KeyError", "error", "KeyError (line 2)"),
    ("eval('= 1')", "error", "SyntaxError"),
    ("import numpy_is_not_here", "error", "ModuleNotFoundError"),
    ("answer = {1, 2}", "error", "set"),
    ("answer = 1j", "error", "complex"),
    ("answer = print", "error", "builtin_function_or_method"),
    ("raise KeyboardInterrupt", "error", "KeyboardInterrupt (line 1)"),
    ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "error", "E: (no message)"),
    ("raise ValueError('a\\nb' + 'c' * 10**6)", "error", "ValueError: a bccc"),
    ("def f():\n    f()\nf()", "error", "RecursionError"),
    ("input()\nanswer = 1", "error", "EOFError"),
    ("x = 1", "no_value", "neither"),
    ("", "no_value", "neither"),
    ("answer = 7 ** 9000", "result_too_large", "digits"),
    ("from decimal import Decimal\nanswer = Decimal('1e999999999')", "result_too_large", "digits"),
    ("answer = 'x' * 5000", "result_too_large", "bytes"),
    ("answer = list(range(10**6))", "result_too_large", "parts"),
    ("answer = []\nanswer.append(answer)", "result_too_large", "deeper"),
    ("print('x' * 5000)", "result_too_large", "line"),
    ("answer = 1\nexit()", "exit", "exit"),
    ("answer = 1\nquit()", "exit", "exit"),
    ("import sys\nanswer = 1\nsys.exit(0)", "exit", "exit"),
    ("import os\nanswer = 1\nos._exit(0)", "exit", "without a value"),
    ("import ctypes\nctypes.string_at(0)", "crashed", "SIGSEGV"),
]


async def test_ends(executor: IsolatedExecutor) -> None:
    for code, status, error in ENDS:
        result = await executor.run(code)
        assert (result.status, result.value) == (status, None), (code, result)
        assert result.error is not None
        assert error in result.error, code
        assert "\n" not in result.error
        assert len(result.error) < 500


@pytest.mark.parametrize("end", ["raise SystemExit", "import os; os._exit(3)", "1 / 0", "while True: pass"])
async def test_what_was_printed_is_kept(executor: IsolatedExecutor, end: str) -> None:
    assert (await executor.run(f"print('before')\n{end}")).stdout == "before\n"


# Hostile programs; a good one runs beside each.

SECRET = "REUSEBENCH_TEST_SECRET"

HOSTILE = {
    "infinite loop": ("while True: pass", {"timeout"}),
    "catches everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        {"timeout"},
    ),
    "ignores signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        {"timeout"},
    ),
    "sleeps": ("import time\ntime.sleep(300)", {"timeout"}),
    "huge power": ("answer = 9 ** 10 ** 9", {"timeout", "memory_limit"}),
    "huge shift": ("answer = 1 << 10 ** 10", {"timeout", "memory_limit"}),
    "huge list": ("answer = [0] * (10 * 2**30 // 8)", {"memory_limit"}),
    "mmap bomb": (
        "import mmap\nkeep = []\nwhile True: keep.append(mmap.mmap(-1, 2**26))",
        {"memory_limit", "error"},
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
        {"timeout", "memory_limit", "crashed"},
    ),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)",
        {"timeout", "crashed", "memory_limit"},
    ),
    "giant output": ("while True: print('x' * 1000)", {"output_limit"}),
    "giant write": ("print('x' * 10**7)", {"output_limit"}),
    "giant errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output_limit"}),
    "output without the signal": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nprint('x' * 10**6)",
        {"output_limit"},
    ),
    "fork bomb": ("import os\nwhile True: os.fork()", {"refused"}),
    "subprocess": ("import subprocess\nsubprocess.run(['sleep', '300'])", {"refused"}),
    "system": (f"import os\nassert os.system('sleep 300') != 0\nopen('/{SECRET}', 'w')", {"refused"}),
    "exec": ("import sys\nsys.modules['os'].execv('/bin/sh', ['sh'])", {"refused"}),
    "thread": ("import threading\nthreading.Thread(target=print).start()", {"refused"}),
    "process": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", {"refused"}),
    "reads passwd": ("answer = open('/etc/passwd').read()", {"refused"}),
    "reads a user's file": (f"answer = open({str(Path(__file__))!r}).read()", {"refused"}),
    "lists the root": ("import os\nanswer = os.listdir('/')", {"refused"}),
    "reads own environment": ("answer = open('/proc/self/environ').read()", {"refused"}),
    "reads the caller's environment": (f"answer = open('/proc/{os.getpid()}/environ').read()", {"refused"}),
    "reads the parent's environment": (
        "import os\nanswer = open(f'/proc/{os.getppid()}/environ').read()",
        {"refused"},
    ),
    "writes own memory": ("open('/proc/self/mem', 'r+b')", {"refused"}),
    "writes home": ("import os, pathlib\nopen(pathlib.Path('~/x').expanduser(), 'w')", {"refused", "error"}),
    "writes cwd": ("open('x', 'w')", {"refused"}),
    "writes tmp": ("open('/tmp/x', 'w')", {"refused"}),
    "writes the library": ("import os\nopen(os.__file__, 'a')", {"refused"}),
    "makes a folder": ("import os\nos.mkdir('/tmp/x')", {"refused"}),
    "symlink": ("import os\nos.symlink('/etc/passwd', '/tmp/x')", {"refused"}),
    "changes mode": ("import os\nos.chmod(os.__file__, 0o777)", {"refused"}),
    "changes root": ("import os\nos.chroot('/tmp')", {"refused"}),
    "becomes another": ("import os\nos.setuid(1)", {"refused"}),
    "TCP": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", {"refused"}),
    "UDP": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", {"refused"}),
    "Unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", {"refused"}),
    "socket pair": ("import socket\nsocket.socketpair()", {"refused"}),
    "name look-up": ("import socket\nsocket.getaddrinfo('example.com', 80)", {"refused"}),
    "fetches": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1/')", {"refused"}),
    "kills the parent": ("import os\nos.kill(os.getppid(), 9)", {"refused"}),
    "kills everyone": ("import os\nos.kill(-1, 9)", {"refused"}),
    "kills its group": ("import os\nos.killpg(0, 9)", {"refused"}),
    "kills the caller": (f"import os\nos.kill({os.getpid()}, 9)", {"refused"}),
    "raises its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        {"refused", "error"},
    ),
    "owns a descriptor's signals": (
        "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETOWN, 1)",
        {"refused", "error"},
    ),
    "closes descriptors": ("import os\nos.closerange(0, 100)\nanswer = 1", {"exit"}),
    "aborts": ("import os\nos.abort()", {"crashed"}),
}
"""A program, and the ends that it may have."""

SYSTEM_CALLS = {  # x86_64: what Python has no function for, called directly
    "ptrace": "101, 16, 1, 0, 0",
    "fork": "57",
    "vfork": "58",
    "clone3": "435, 0, 0",
    "execve": "59, 0, 0, 0",
    "socket": "41, 2, 1, 0",
    "io_uring_setup": "425, 1, 0",
    "process_vm_readv": "310, 1, 0, 0, 0, 0, 0",
    "bpf": "321, 0, 0, 0",
    "unshare": "272, 0x10000000",
    "mount": "165, 0, 0, 0, 0, 0",
    "prctl": "157, 4, 1",
    "seccomp": "317, 0, 0, 0",
    "memfd_create": "319, b'x', 0",
    "openat2": "437, -100, b'/etc/passwd', 0, 0",
    "tgkill": "234, 1, 1, 9",
    "pidfd_open": "434, 1, 0",
    "x32 write": "0x40000001, 1, b'x', 1",
}


async def _beside(executor: IsolatedExecutor, hostile: str) -> ProgramResult:
    """Run a hostile program with a good one beside it and one after it."""
    running = asyncio.create_task(executor.run(hostile))
    await asyncio.sleep(0)
    assert (await executor.run("answer = 'beside'")).value == "beside"
    result = await running
    assert (await executor.run("answer = 'after'")).value == "after"
    return result


@isolating
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile(shared: IsolatedExecutor, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "secret")
    code, statuses = HOSTILE[name]
    await shared.start()
    before = _descendants(os.getpid())
    result = await _beside(shared, code)
    assert result.status in statuses, result
    assert len(result.stdout) <= LIMITS.output_bytes
    assert result.wall_ns < 4_000_000_000
    assert _descendants(os.getpid()) == before  # no child is left, not even a dead one


@isolating
async def test_system_calls_are_denied(executor: IsolatedExecutor) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    calls = ", ".join(f"({name!r}, {call})" for name, call in SYSTEM_CALLS.items())
    result = await executor.run(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nanswer = {}\n"
        f"for name, *call in [{calls}]:\n"
        "    done = libc.syscall(*(a if isinstance(a, bytes) else ctypes.c_long(a) for a in call))\n"
        "    answer[name] = [done, ctypes.get_errno()]"
    )
    assert result.status == "ok", result
    expected = {name: [-1, 38 if name == "clone3" else 1] for name in SYSTEM_CALLS}
    assert result.value == expected


@isolating
def test_without_landlock_no_file_opens() -> None:
    code = (
        "import os\nfrom methods.execution import confine\n"
        "assert confine.install_filter(confine.filter_program(may_open=False))\n"
        "try:\n    open('/etc/passwd')\nexcept PermissionError:\n    os._exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 7


@isolating
async def test_the_environment_is_not_visible(
    executor: IsolatedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "secret")
    result = await executor.run(
        "import os, sys\nanswer = [dict(os.environ), sys.path, os.getppid(), sys.argv, len(os.listdir('/'))]"
    )
    assert result.status == "refused"
    result = await executor.run("import os, sys\nanswer = [sorted(os.environ), sys.argv]")
    assert result.value == [["LC_CTYPE", "PYTHONHASHSEED"], [""]] or result.value == [
        ["PYTHONHASHSEED"],
        [""],
    ]


@isolating
async def test_files_of_others_stay(executor: IsolatedExecutor, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("here")
    for code in (
        f"import os\nos.remove({str(victim)!r})",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"import os\nos.rename({str(victim)!r}, '/tmp/x')",
        f"import os\nos.truncate({str(victim)!r}, 0)",
        f"import os\nos.link({str(victim)!r}, '/tmp/x')",
        f"import os\nos.utime({str(victim)!r})",
    ):
        assert (await executor.run(code)).status == "refused", code
    assert victim.read_text() == "here"


GARBAGE = (
    "b'garbage'",
    "b'[' * 5000",
    "b'[' * 900 + b']' * 900",
    "b'{\"status\": \"ok\", \"value\": ' + b'[' * 100 + b']' * 100 + b'}'",
    'b\'{"status": "executor_error"}\'',
    'b\'{"status": ["ok"]}\'',
    'b\'{"status": "ok", "error": 3}\'',
    "b'\\xff' * 100",
    "b'9' * 5000",
)


async def test_garbage_in_every_descriptor(executor: IsolatedExecutor) -> None:
    for garbage in GARBAGE:
        code = (
            f"import os\nfor fd in range(64):\n    try: os.write(fd, {garbage})\n    except OSError: pass\n"
            "os._exit(0)"
        )
        result = await _beside(executor, code)
        assert (result.status, result.value) == ("error", None), result
        result = await _beside(executor, code.removesuffix("os._exit(0)") + "answer = 1")
        assert (result.status, result.value) == ("error", None), result


async def test_a_program_forges_only_its_own_result(executor: IsolatedExecutor) -> None:
    forged = b'{"status": "ok", "value": 13}'
    code = (
        f"import os\nfor fd in range(3, 64):\n    try: os.write(fd, {forged})\n    except OSError: pass\n"
        "os._exit(0)"
    )
    results = await asyncio.gather(*(executor.run(c) for c in [code, "answer = 1"] * 4))
    assert [result.value for result in results] == [13, 1] * 4


async def test_parent_memory_stays_flat(executor: IsolatedExecutor) -> None:
    import resource

    await executor.run("answer = 1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await asyncio.gather(*(executor.run("while True: print('x' * 10**6)") for _ in range(6)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


# The executor's own life


async def test_several_at_once_and_the_rest_in_line() -> None:
    limits = Limits(wall_s=1.0)
    async with IsolatedExecutor(limits, concurrency=2) as executor:
        results = await asyncio.gather(
            *(executor.run("import time\ntime.sleep(0.6)\nanswer=1") for _ in range(4))
        )
    # The last ones end after more than one limit, most of it in line.
    assert [result.status for result in results] == ["ok"] * 4
    assert all(result.wall_ns < 1_000_000_000 for result in results)


@isolating
async def test_layers_where_the_system_has_them(executor: IsolatedExecutor) -> None:
    assert executor.layers() == ()
    await executor.start()
    assert set(executor.layers()) <= set(LAYERS)
    assert {"seccomp", "rlimits", "no-capabilities"} <= set(executor.layers())


@isolating
async def test_cancelling_kills_the_program(executor: IsolatedExecutor) -> None:
    await executor.run("answer = 1")
    task = asyncio.create_task(executor.run("import time\ntime.sleep(300)"))
    program = await _started(executor)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _gone({program})
    assert (await executor.run("answer = 1")).status == "ok"


@isolating
@pytest.mark.parametrize("is_inner", [True, False])
async def test_a_killed_zygote_is_replaced(executor: IsolatedExecutor, is_inner: bool) -> None:
    assert (await executor.run("answer = 1")).status == "ok"
    task = asyncio.create_task(executor.run("import time\nprint('on')\ntime.sleep(300)"))
    program = await _started(executor)
    outer, inner = _zygote(executor)
    os.kill(inner if is_inner else outer, signal.SIGKILL)
    if not is_inner:
        assert await _gone({inner})  # which the kernel sees to
    # At once, whether or not its death has been noticed.
    assert (await executor.run("answer = 2")).value == 2
    result = await task
    assert (result.status, result.stdout) == ("executor_error", "on\n")
    assert await _gone({outer, inner, program})


@isolating
async def test_a_hung_zygote_is_replaced(executor: IsolatedExecutor) -> None:
    await executor.run("answer = 1")
    outer, inner = _zygote(executor)
    os.kill(inner, signal.SIGSTOP)
    assert (await executor.run("answer = 2")).value == 2
    assert await _gone({outer, inner})


@isolating
async def test_close_ends_everything() -> None:
    executor = IsolatedExecutor(LIMITS)
    await executor.close()
    executor = IsolatedExecutor(LIMITS)
    task = asyncio.create_task(executor.run("import time\ntime.sleep(300)"))
    program = await _started(executor)
    everything = {*_zygote(executor), program}
    await executor.close()
    await executor.close()
    assert (await task).status == "executor_error"
    assert not any(Path(f"/proc/{process}").exists() for process in everything)
    with pytest.raises(RuntimeError, match="closed"):
        await executor.run("answer = 1")


async def test_bad_use_is_told() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        IsolatedExecutor(concurrency=0)
    with pytest.raises(ValueError, match="above zero"):
        Limits(wall_s=0)
    with pytest.raises(ValueError, match="address space"):
        Limits(memory_bytes=1)
    async with IsolatedExecutor() as executor:
        with pytest.raises(TypeError):
            await executor.run("answer = 1", arguments={"x": object()})


async def test_no_interpreter_is_an_executor_error(
    executor: IsolatedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert (await executor.run("answer = 1")).status == "executor_error"
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert (await executor.run("answer = 1")).status == "executor_error"
    monkeypatch.undo()
    assert (await executor.run("answer = 1")).status == "ok"


ORPHANS = """
import asyncio, sys
from methods.execution import IsolatedExecutor

async def main():
    executor = IsolatedExecutor()
    await executor.run("answer = 1")
    task = asyncio.create_task(executor.run("while True: pass"))
    await asyncio.sleep(0.2)
    sys.stdout.write("on\\n")
    sys.stdout.flush()
    await task

asyncio.run(main())
"""


@isolating
async def test_a_killed_caller_leaves_no_orphans() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], cwd=ROOT, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"on\n"
        everything = _descendants(caller.pid)
        assert len(everything) == 3
        caller.kill()
    assert await _gone(everything)


UNPRIVILEGED = """
import asyncio, json, os, sys, time
from methods.execution import IsolatedExecutor, Limits

async def main():
    async with IsolatedExecutor(Limits(wall_s=1.0)) as executor:
        ends = [(await executor.run(code)).status for code in json.loads(sys.argv[1])]
        sys.stdout.write(json.dumps([os.getuid(), executor.layers(), ends]))

asyncio.run(main())
"""


@isolating
def test_without_root(tmp_path: Path) -> None:
    names = [
        name
        for name in HOSTILE
        if name in ("infinite loop", "fork bomb", "thread", "TCP", "exec", "huge list", "giant output")
        or name.startswith(("reads", "writes", "kills"))
    ]
    programs = json.dumps(["answer = 1", *(HOSTILE[name][0] for name in names)])
    command = [_python_for_all(), "-c", UNPRIVILEGED, programs]
    identity = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for package in ("bench", "methods"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, **identity)
    assert done.returncode == 0, done.stderr
    user, layers, ends = json.loads(done.stdout)
    assert user != 0
    assert {"seccomp", "rlimits", "no-capabilities"} <= set(layers)
    assert ends[0] == "ok"
    for program, end in zip(names, ends[1:], strict=True):
        assert end in HOSTILE[program][1], program


def _python_for_all() -> str:
    """An interpreter that another user may run."""
    if os.getuid() != 0:
        return sys.executable
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        check = [python, "-c", "import sys; raise SystemExit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(check, user=65534, group=65534, extra_groups=[], cwd="/").returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("no interpreter that another user may run")

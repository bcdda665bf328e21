"""The suite's own overheads beside their targets: `make bench`.

Absolute times mean something only beside the machine that they were taken on, so it is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.config import Cell, EngineConfig
from bench.encoder import Embedding, Encoder
from bench.engine import Completion, EngineCall, Purpose, Role
from bench.execution import ProgramExecutor
from bench.method import Background, ChatRequest, Environment, StateEvent, Trace
from bench.registry import method_class
from bench.workload import GenericTask, Task
from data.formula.task import FormulaTask
from methods.execution import IsolatedExecutor
from methods.gptcache import prompt_of
from methods.minicache.template import Variable
from methods.routing import CentroidIndex, pack_vector, unpack_vector
from runners.chat import open_session
from runners.child import ServiceProcess
from runners.client import Endpoint
from runners.encoder import SentenceEncoder
from runners.engines.mock import MockEngine
from runners.machine import machine_facts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bench.encoder import Vector

    Vectors = NDArray[np.float32]
    """Unit vectors, shape (n, dimensions)."""

__all__ = ["Figure", "main", "measure"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One overhead.

    Attributes:
        name: What was measured, and how.
        n: Repetitions, after a warm-up.
        p50, p90: Milliseconds.
        target: The p50 should stay below, milliseconds.
    """

    name: str
    n: int
    p50: float
    p90: float
    target: float


async def measure() -> list[Figure]:
    """Measure every overhead; takes about a minute."""
    return [
        *_imports(),
        await _hit(stream=False),
        await _hit(stream=True),
        await _program(),
        *(_routing(groups, target) for groups, target in ((1_000, 0.1), (10_000, 1.0), (100_000, 12.0))),
        await _embedding(),
        *[await _gptcache(entries, target) for entries, target in ((100, 3.5), (10_000, 6.4))],
        await _minicache(),
    ]


def _imports(n: int = 15) -> list[Figure]:
    contracts = "bench, bench.method, bench.workload, bench.registry, bench.config, bench.records"
    return [
        _figure(f"import {name}, new process", [_import_time(modules) for _ in range(n + 1)][1:], 300)
        for name, modules in (("bench", "bench"), ("the contracts", contracts))
    ]


def _import_time(modules: str) -> float:
    code = f"import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


async def _hit(*, stream: bool, n: int = 2000) -> Figure:
    """Time an ExactCache hit over HTTP, one request at a time, as a client sees it."""
    engine = MockEngine(EngineConfig(kind="mock"), "target")
    cell = Cell(method="exactcache", workload="formula")
    body = {"model": "m", "messages": [{"role": "user", "content": "What is 2 + 3? " * 20}], "stream": stream}
    with tempfile.TemporaryDirectory() as folder:
        endpoint = Endpoint(await engine.start(Path(folder)), model="mock")
        service = ServiceProcess(
            cell, {"target": endpoint}, Path(folder) / "state.jsonl", Path(folder) / "service.log"
        )
        try:
            await service.start()
            async with open_session() as session:

                async def ask() -> None:
                    async with session.post(f"{service.url}/chat/completions", json=body) as reply:
                        await reply.read()

                times = await _repeat(ask, n)
        finally:
            await service.stop()
            await engine.stop()
    how = "stream" if stream else "no stream"
    return _figure(f"ExactCache hit over HTTP, {how}", times, 1)


async def _program(n: int = 500) -> Figure:
    async with IsolatedExecutor() as executor:

        async def run() -> None:
            result = await executor.run("rate = 0.05\nanswer = 1000 * (1 + rate) ** 3")
            if result.status != "ok":
                raise RuntimeError(f"the program should run: {result}")

        return _figure("program, fresh process each", await _repeat(run, n), 3)


def _routing(groups: int, target: float, n: int = 200) -> Figure:
    chance = np.random.default_rng(0)
    index = CentroidIndex(384)
    for vector in _units(chance, groups, 384):
        index.add(vector)
    asked = _units(chance, n, 384)
    times = []
    for vector in asked:
        began = time.perf_counter()
        index.nearest(vector)
        times.append(time.perf_counter() - began)
    return _figure(f"routing among {groups:,} groups", times[n // 10 :], target)


def _units(chance: np.random.Generator, n: int, dimensions: int) -> Vectors:
    vectors: Vectors = chance.standard_normal((n, dimensions), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


async def _embedding(n: int = 100) -> Figure:
    encoder = SentenceEncoder()
    text = "A firm with sales of $4.2 million and costs of $3.1 million asks for its gross margin "

    async def embed() -> None:
        await encoder.embed([text])

    return _figure("embedding of one short request", await _repeat(embed, n), 15)


async def _gptcache(entries: int, target: float, n: int = 200) -> Figure:
    """Time a GPTCache hit inside the method, the embedding apart."""
    encoder = _Known()
    cache = _build("gptcache", GenericTask(), encoder)
    requests = []
    for at, vector in enumerate(_units(np.random.default_rng(0), entries, encoder.dimensions)):
        request = ChatRequest("m", ({"role": "user", "content": f"request {at}"},))
        encoder.vectors[prompt_of(request.messages)] = vector
        requests.append(request)
        await cache.reply(request, _InProcess(cache, "fine"))
    times = [await _timed_hit(cache, requests[at * 37 % entries], "fine") for at in range(n)]
    cache.reset()
    return _figure(f"GPTCache get among {entries:,} entries", times[n // 10 :], target)


async def _minicache(groups: int = 1000, n: int = 300) -> Figure:
    """Time a MiniCache hit inside the method, without its engine call, its embeddings and its program."""
    shot = ("Sales of 500 and costs of 300: what is the margin?", {"sales": "500", "costs": "300"})
    names = ("sales", "costs")
    entry = {
        "id": "group-0/1",
        "template": [asdict(Variable(name, "number", name)) for name in names],
        "code": "def solve(sales, costs):\n    return (sales - costs) / sales * 100\n",
        "shots": [shot],
        "made_by": "target",
        "pattern": None,
    }
    request = ChatRequest("m", ({"role": "user", "content": "Costs: 160. Sales: 640. What is the margin?"},))
    async with IsolatedExecutor() as executor:
        encoder = _Known()
        cache = _build("minicache", FormulaTask(), encoder, executor)
        await cache.reply(request, _InProcess(cache, "```python\nanswer = 75\n```"))  # opens a group
        (group,) = cache.snapshot()
        cache.reset()
        own = unpack_vector(group["total"])
        others = _units(np.random.default_rng(0), groups - 1, encoder.dimensions)
        for vector in (own, *others):
            total = pack_vector(vector)
            cache.apply({**group, "total": total, "state": {**group["state"], "entry": entry}})
        times = [
            await _timed_hit(cache, request, '{"sales": "640", "costs": "160"}', apart="execute")
            for _ in range(n)
        ]
    return _figure(
        f"MiniCache hit among {groups:,} groups, engine, embedding and program apart", times[n // 10 :], 2
    )


def _build(name: str, task: Task, encoder: Encoder, executor: ProgramExecutor | None = None) -> Any:
    method: Any = method_class(name)
    return method(method.Config(), Environment(task, executor or IsolatedExecutor(), encoder))


async def _timed_hit(cache: Any, request: ChatRequest, text: str, apart: str | None = None) -> float:
    """Return the seconds that a hit took inside the method, without its stage ``apart``."""
    context = _InProcess(cache, text)
    began = time.perf_counter()
    reply = await cache.reply(request, context)
    wall = time.perf_counter() - began
    if not reply.cache.hit:
        raise RuntimeError(f"the request should be a hit: {reply.cache}")
    stages = [stage for stage in context.trace.stages if stage.name == apart]
    return wall - sum((stage.finished_ns or stage.started_ns) - stage.started_ns for stage in stages) / 1e9


class _Known:
    """An encoder whose every text has a vector already: embedding takes no time."""

    name = "known"
    dimensions = 384

    def __init__(self) -> None:
        self.vectors: dict[str, Vector] = {}

    async def embed(self, texts: Sequence[str], *, whole: bool = True) -> list[Embedding]:
        return [Embedding(self._vector(text), 1, 1) for text in texts]

    def _vector(self, text: str) -> Vector:
        if text not in self.vectors:
            seed = zlib.crc32(text.encode())
            self.vectors[text] = _units(np.random.default_rng(seed), 1, self.dimensions)[0]
        return self.vectors[text]


class _InProcess:
    """A request's context without a service; its engines answer at once, always the same."""

    role: Role = "target"

    def __init__(self, method: Any, text: str) -> None:
        self.trace = Trace(time.monotonic_ns())
        self.target = self.small = self
        self._method = method
        self._text = text

    async def emit(self, text: str) -> None:
        """Drop what is streamed."""

    def commit(self, event: StateEvent) -> None:
        """Apply a change; there is no journal."""
        self._method.apply(event)

    def background(self, name: str, work: Background) -> None:
        """Start nothing."""

    async def chat(self, *_: Any, purpose: Purpose, **__: Any) -> Completion:
        """Answer."""
        call = EngineCall("target", purpose, tokens_out=1)
        self.trace.calls.append(call)
        return Completion(self._text, "stop", call)


async def _repeat(action: Callable[[], Awaitable[None]], n: int) -> list[float]:
    for _ in range(max(20, n // 10)):
        await action()
    times = []
    for _ in range(n):
        began = time.perf_counter()
        await action()
        times.append(time.perf_counter() - began)
    return times


def _figure(name: str, seconds: Sequence[float], target: float) -> Figure:
    ordered = sorted(seconds)
    return Figure(
        name,
        len(ordered),
        ordered[len(ordered) // 2] * 1000,
        ordered[int(len(ordered) * 0.9)] * 1000,
        target,
    )


def main() -> None:
    """Print every overhead beside its target."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    arguments = parser.parse_args()
    figures = asyncio.run(measure())
    machine = machine_facts()
    if arguments.json:
        sys.stdout.write(
            json.dumps({"machine": machine, "figures": [asdict(one) for one in figures]}, indent=1) + "\n"
        )
        return
    memory = f"{machine['ram_bytes'] / 2**30:.0f} GiB" if machine["ram_bytes"] else "unknown memory"
    console = Console(highlight=False)
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {memory}, {machine['os']}, Python {machine['python']}"
    )
    table = Table("overhead", "n", "p50, ms", "p90, ms", "target", "met")
    for one in figures:
        met = "yes" if one.p50 < one.target else "no"
        table.add_row(one.name, str(one.n), f"{one.p50:.3f}", f"{one.p90:.3f}", f"< {one.target:g}", met)
    console.print(table)


if __name__ == "__main__":
    main()

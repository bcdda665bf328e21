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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.config import Cell, EngineConfig
from methods.execution import IsolatedExecutor
from runners.chat import open_session
from runners.child import ServiceProcess
from runners.client import Endpoint
from runners.engines.mock import MockEngine
from runners.machine import machine_facts

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
    """Measure every overhead; takes about half a minute."""
    return [*_imports(), await _hit(stream=False), await _hit(stream=True), await _program()]


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

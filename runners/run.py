"""Runs every cell of a resolved configuration: sequential, closed loop, over HTTP, one record per request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from bench.cells import latest
from bench.config import Cell, RunConfig, validate
from bench.errors import EngineUnavailable
from bench.records import Record
from bench.registry import method_class, variant, workload
from bench.samples import Sample
from bench.workload import DatasetFacts, Workload
from runners import encoder
from runners.chat import open_session
from runners.child import ServiceProcess
from runners.journal import prune
from runners.observe import Clock, Planned, background_record, observe
from runners.pair import SPECULATIVE, Pair, engines_of, start_pair
from runners.serve import roles_of
from runners.store import Run

__all__ = ["CellPlan", "Progress", "execute", "plan", "resolve", "engines_called"]

_GIVE_UP_AFTER = 5
"""Requests in a row without an answer after which the run stops instead of failing every one left."""
_READY_S = 120.0
_BACKGROUND_S = 300.0
"""At the end of a cell, work beside its requests has this long to end: it must not disturb the next cell."""


class Progress(Protocol):
    """Told what happens, to draw it."""

    def phase(self, text: str) -> None:
        """Something without a known length has begun (starting engines, …)."""
        ...

    def cell(self, cell_id: str, done: int, total: int) -> None:
        """A cell begins, with ``done`` of its ``total`` requests recorded earlier."""
        ...

    def record(self, record: Record) -> None:
        """A request has been recorded."""
        ...


@dataclass(frozen=True, slots=True)
class CellPlan:
    """A cell with everything loaded that it needs."""

    cell: Cell
    workload: Workload
    samples: list[Sample]
    facts: DatasetFacts

    @property
    def planned(self) -> list[Planned]:
        """Every request of the cell, in its order."""
        return [
            Planned(self.cell, repeat, index, sample)
            for repeat in range(self.cell.repeats)
            for index, sample in enumerate(self.samples)
        ]


def resolve(config: RunConfig) -> RunConfig:
    """Return ``config`` with every method's settings checked, their defaults filled in, and paths absolute.

    Raises:
        UsageError: A name or a setting is unknown.
    """
    cells = []
    for cell in config.cells:
        spec = variant(cell.method)
        cls: Any = method_class(spec.method)
        given = {**spec.config, **cell.method_config}
        settings = validate(cls.Config, given, f"{cell.id}.method_config")
        workload(cell.workload)
        selection = cell.selection
        if selection.path is not None and Path(selection.path).exists():
            # So that the run can be resumed from another folder.
            selection = selection.model_copy(update={"path": str(Path(selection.path).resolve())})
        own = settings.model_dump(mode="json")
        cells.append(cell.model_copy(update={"method_config": own, "selection": selection}))
    return config.model_copy(update={"cells": tuple(cells)})


def plan(config: RunConfig) -> list[CellPlan]:
    """Load the samples of every cell; cells with one selection share them.

    Raises:
        DataMissing, UsageError: As :meth:`bench.workload.Workload.load`.
    """
    loaded: dict[str, tuple[Workload, list[Sample], DatasetFacts]] = {}
    plans = []
    for cell in config.cells:
        key = f"{cell.workload} {cell.selection.model_dump_json()}"
        if key not in loaded:
            one = workload(cell.workload)
            loaded[key] = (one, *one.load(cell.selection.selection()))
        one, samples, facts = loaded[key]
        plans.append(CellPlan(cell, one, samples if cell.first is None else samples[: cell.first], facts))
    return plans


async def execute(run: Run, config: RunConfig, plans: list[CellPlan], progress: Progress) -> None:
    """Do every request of ``plans`` that has no record yet, and record it.

    The run must be locked. Engines are started for the roles that the methods left to run call.

    Raises:
        ModelMissing, EngineUnavailable: An engine or a service did not come up, or failed for good; what
            was recorded stays, and ``resume`` goes on from there.
    """
    records = run.records()
    clock = Clock(
        max((record.times.finished for record in records), default=0),
        max((record.session for record in records), default=-1) + 1,
    )
    todo = {item.cell.id: _left(item, records) for item in plans}
    names = engines_called(item.cell for item in plans if todo[item.cell.id])
    if not names:
        return
    encoding = encoder.needed(item.cell.method for item in plans if todo[item.cell.id])
    if encoding:
        encoder.check()
    progress.phase("starting " + " and ".join(f"the {name} engine" for name in names))
    async with start_pair(config.pair, names, run.path / "logs") as pair, open_session() as session:
        before = run.read().get("engines") or {}
        if encoding:
            before = {**before, "encoder": encoder.facts()}
        run.update(engines=_engine_facts(before, await pair.probe()))
        try:
            for item in plans:
                left = todo[item.cell.id]
                progress.cell(item.cell.id, len(item.planned) - len(left), len(item.planned))
                if left:
                    await _run_cell(run, item, left, records, pair, session, clock, progress)
        finally:  # also of a run that stops here: restarts so far must not be forgotten
            run.update(engines=_engine_facts(before, await pair.probe()))


def engines_called(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the names of the engines that the methods of ``cells`` call, the target first.

    Raises:
        UsageError: As :func:`runners.pair.engines_of`.
    """
    wanted = {
        name
        for cell in cells
        for name in engines_of(cell.method, roles_of(cell.method, cell.method_config)).values()
    }
    return tuple(name for name in ("target", SPECULATIVE, "small") if name in wanted)


def _engine_facts(before: Mapping[str, Any], probe: Mapping[str, Any]) -> dict[str, Any]:
    """Lay what the engines say over what an earlier session wrote; restarts add up."""
    result = dict(before)
    for role, facts in probe.items():
        if facts is not None:
            earlier = (before.get(role) or {}).get("restarts") or 0
            more = {"restarts": earlier + facts["restarts"]} if "restarts" in facts else {}
            result[role] = {**facts, **more}
    return result


def _left(item: CellPlan, records: list[Record]) -> list[tuple[Planned, int]]:
    """Return the requests to do with their attempt numbers: new ones first, then those that failed."""
    last = {record.key: record for record in latest(records) if record.cell == item.cell.id}
    new = [(planned, 1) for planned in item.planned if planned.key not in last]
    failed = [
        (planned, last[planned.key].attempt + 1)
        for planned in item.planned
        if planned.key in last and not last[planned.key].completed
    ]
    return new + failed


async def _run_cell(
    run: Run,
    item: CellPlan,
    left: list[tuple[Planned, int]],
    earlier: list[Record],
    pair: Pair,
    session: aiohttp.ClientSession,
    clock: Clock,
    progress: Progress,
) -> None:
    cell = item.cell
    resets = dict(run.read().get("cache_resets") or {})
    resets.setdefault(cell.id, []).append(await pair.reset_caches())
    run.update(cache_resets=resets)
    state = run.path / "cache" / f"{cell.id}.jsonl"
    endpoints = pair.endpoints_of(cell.method, roles_of(cell.method, cell.method_config))
    log, calls = run.path / "logs" / f"{cell.id}.log", run.path / "calls" / f"{cell.id}.jsonl"
    service = ServiceProcess(cell, endpoints, state, log, calls)
    done = {_request_id(run, record.key, record.attempt) for record in earlier if record.completed}
    failures = 0
    beside = _Background(run, cell.id, service, session, clock)
    try:
        for planned, attempt in left:
            if not service.alive:
                await service.stop()
                # What a request that came to nothing did to the state never happened.
                prune(state, done.__contains__)
                await service.start()
                beside.seen = 0
            request_id = _request_id(run, planned.key, attempt)
            record = await observe(
                session, service.url, run.id, planned, attempt, request_id, item.workload, clock
            )
            run.append(record)
            progress.record(record)
            await beside.collect()
            if record.completed:
                done.add(request_id)
                failures = 0
                continue
            failures += 1
            if record.outcome == "timeout":
                # Its work may still go on in there, and would disturb the requests after it.
                await service.stop(at_once=True)
            if failures >= _GIVE_UP_AFTER or not await pair.wait_ready(_READY_S):
                message = record.error.message if record.error else "no message"
                count = "a request" if failures == 1 else f"{failures} requests in a row"
                raise EngineUnavailable(
                    f"{cell.id}: {count} failed ({record.outcome}: {message}). Cure the cause (the logs are "
                    f"in {run.path / 'logs'}), then: {run.resume_command}"
                )
        if service.alive:
            progress.phase(f"{cell.id}: waiting for work beside the requests")
            await beside.collect(wait_s=_BACKGROUND_S)
    finally:
        await service.stop()


class _Background:
    """Collects what a cell's service did beside its requests."""

    def __init__(
        self, run: Run, cell: str, service: ServiceProcess, session: aiohttp.ClientSession, clock: Clock
    ) -> None:
        self.seen = 0
        self._run = run
        self._cell = cell
        self._service = service
        self._session = session
        self._clock = clock

    async def collect(self, wait_s: float = 0) -> None:
        """Record what has finished since the last time; a service that does not answer has told all it could.

        Args:
            wait_s: How long to wait for what still runs, seconds.
        """
        url = f"{self._service.url.removesuffix('/v1')}/admin/background?after={self.seen}&wait_s={wait_s:g}"
        try:
            async with self._session.get(url) as reply:
                told = await reply.json()
        except (aiohttp.ClientError, TimeoutError):
            return
        for entry in told["finished"]:
            self.seen += 1
            self._run.append_background(background_record(self._run.id, self._cell, entry, self._clock))


def _request_id(run: Run, key: tuple[str, int, int], attempt: int) -> str:
    cell, repeat, index = key
    return f"{run.id}/{cell}/{repeat}/{index}/{attempt}"

"""A run's records, cell by cell: which of them count, and how cells pair up.

A cell's records are those of phase ``measure``, the latest attempt of each request. Of these,

- *attempted* are all but the ones that the user cancelled,
- *completed* are those that the method got to answer (:attr:`bench.records.Record.completed`),
- *answered* are those that brought a whole reply (``ok``, ``truncated``, ``unparsed``): the successes of
  every latency and throughput. A refused (4xx) request is completed, and wrong, but no success.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bench.records import BackgroundRecord, CallRecord, Record

__all__ = ["CellData", "Pair", "baseline_cell", "cells_of", "latest"]

Pair = tuple[str, int]
"""What pairs requests across cells: sample id and repeat."""


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the measured records, the latest attempt of each request, in the order of their lines."""
    newest: dict[tuple[str, int, int], int] = {}
    kept: list[Record | None] = []
    for record in records:
        if record.phase != "measure":
            continue
        before = newest.get(record.key)
        if before is not None:
            old = kept[before]
            if old is not None and old.attempt > record.attempt:
                continue
            kept[before] = None
        newest[record.key] = len(kept)
        kept.append(record)
    return [record for record in kept if record is not None]


@dataclass(frozen=True)
class CellData:
    """What a metric sees of a cell.

    Attributes:
        id: The cell's id.
        records: Its measured records, latest attempts, in the order of their lines.
        planned: Requests that the run meant to send; None where unknown.
        primary: The score that accuracy means.
        background: What the method did beside its requests.
        baseline_right: Whether the baseline was right, per (sample, repeat) that it completed; None where
            the workload has no baseline cell.
        baseline_engine_ns: Time that the baseline's engine calls took, per (sample, repeat), in ns; None
            likewise.
    """

    id: str
    records: tuple[Record, ...]
    planned: int | None = None
    primary: str = "strict"
    background: tuple[BackgroundRecord, ...] = ()
    baseline_right: Mapping[Pair, bool] | None = field(default=None, repr=False)
    baseline_engine_ns: Mapping[Pair, int] | None = field(default=None, repr=False)

    @cached_property
    def attempted(self) -> tuple[Record, ...]:
        """Every record but the cancelled ones."""
        return tuple(record for record in self.records if record.outcome != "cancelled")

    @cached_property
    def completed(self) -> tuple[Record, ...]:
        """Those that the method got to answer."""
        return tuple(record for record in self.attempted if record.completed)

    @cached_property
    def answered(self) -> tuple[Record, ...]:
        """Those with a whole reply: the successes."""
        return tuple(r for r in self.attempted if r.outcome in ("ok", "truncated", "unparsed"))

    @cached_property
    def traced(self) -> tuple[Record, ...]:
        """The answered ones about which the service told what it did."""
        return tuple(record for record in self.answered if record.cache is not None)

    @cached_property
    def calls_beside(self) -> tuple[CallRecord, ...]:
        """The engine calls of the work beside the requests."""
        return tuple(call for work in self.background for call in work.calls)

    @cached_property
    def warm_ns(self) -> int | None:
        """When the last entry of a cache was installed, in ns of run time; None where none was."""
        times = [work.finished for work in self.background if work.details.get("accepted")]
        return max(times, default=None)

    @cached_property
    def caches(self) -> bool:
        """Whether the method has a cache: any event of another kind than ``none``."""
        return any(r.cache is not None and r.cache.kind != "none" for r in self.attempted)

    @cached_property
    def hits(self) -> tuple[Record, ...]:
        """Attempted requests that a cache answered."""
        return tuple(record for record in self.attempted if record.hit)

    @cached_property
    def misses(self) -> tuple[Record, ...]:
        """Attempted requests that the cache did not answer."""
        return tuple(r for r in self.attempted if r.cache is not None and r.cache.kind == "miss")

    @cached_property
    def graded(self) -> bool:
        """Whether this workload grades: false where replies came and none of them has a grade."""
        return not self.answered or any(record.grade is not None for record in self.answered)

    def score(self, record: Record, name: str | None = None) -> float:
        """Return a record's score, 0 where it has no grade (a failed request is a wrong one)."""
        return 0.0 if record.grade is None else record.grade.scores.get(name or self.primary, 0.0)

    def right(self, record: Record) -> bool:
        """Tell whether a record is fully right by the primary score."""
        return self.score(record) >= 1.0


def cells_of(
    run: Mapping[str, Any], records: Iterable[Record], background: Iterable[BackgroundRecord] = ()
) -> dict[str, CellData]:
    """Split a run's records into its cells, in the order of the configuration, empty cells included."""
    beside: dict[str, list[BackgroundRecord]] = {}
    for work in background:
        beside.setdefault(work.cell, []).append(work)
    by_cell: dict[str, list[Record]] = {str(cell["id"]): [] for cell in run["config"]["cells"]}
    for record in latest(records):
        by_cell.setdefault(record.cell, []).append(record)
    configs = {str(cell["id"]): cell for cell in run["config"]["cells"]}
    primary = {
        name: str(facts.get("primary_score", "strict"))
        for name, facts in (run.get("workloads") or {}).items()
    }
    planned = run.get("planned") or {}

    def build(
        cell: str, right: Mapping[Pair, bool] | None = None, spent: Mapping[Pair, int] | None = None
    ) -> CellData:
        workload = configs.get(cell, {}).get("workload", "")
        return CellData(
            cell,
            tuple(by_cell[cell]),
            planned.get(cell),
            primary.get(workload, "strict"),
            tuple(beside.get(cell, ())),
            right,
            spent,
        )

    result: dict[str, CellData] = {}
    for cell in by_cell:
        base = baseline_cell(run, configs.get(cell, {}).get("workload"))
        right = spent = None
        if base is not None:
            data = build(base)
            right = {(r.sample, r.repeat): data.right(r) for r in data.completed} if data.graded else None
            spent = {
                (r.sample, r.repeat): sum(c.finished - c.started for c in r.calls if c.started and c.finished)
                for r in data.completed
            }
        result[cell] = build(cell, right, spent)
    return result


def baseline_cell(run: Mapping[str, Any], workload: str | None) -> str | None:
    """Return the id of the workload's baseline cell, or None; unlabelled cells go first."""
    name = (run.get("experiment") or {}).get("baseline") or run["config"].get("baseline")
    found = [c for c in run["config"]["cells"] if c["workload"] == workload and c["method"] == name]
    found.sort(key=lambda cell: cell.get("label") is not None)
    return str(found[0]["id"]) if found else None

"""Whether a run's numbers may be used: VALID, or INVALID with each problem and its remedy.

A check is one function that yields reasons; :data:`CHECKS` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cells import CellData, baseline_cell, cells_of
from bench.records import SCHEMA_VERSION, Record
from bench.registry import SPECDEC

__all__ = ["CHECKS", "MIN_COVERAGE", "Reason", "verdict"]

MIN_COVERAGE = 0.99
"""Share of planned requests that must be completed for a row to be ranked."""


MAX_REFUSED = 0.1
"""Share of refused requests above which a cell tells more about settings than about its method."""


@dataclass(frozen=True)
class Reason:
    """Why a run is invalid, and what to do about it."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class _Facts:
    run: Mapping[str, Any]
    records: Sequence[Record]
    cells: Mapping[str, CellData]

    @property
    def id(self) -> str:
        return str(self.run["id"])

    @property
    def resume(self) -> str:
        return f"`reusebench resume {self.id}`"

    def configs(self) -> list[Mapping[str, Any]]:
        return list(self.run["config"]["cells"])


def verdict(run: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return ``{"valid": bool, "reasons": [{"problem", "remedy"}, …]}`` for ``run.json``."""
    facts = _Facts(run, records, cells_of(run, records))
    reasons = [reason for check in CHECKS for reason in check(facts)]
    return {"valid": not reasons, "reasons": [asdict(reason) for reason in reasons]}


def _schema(facts: _Facts) -> Iterator[Reason]:
    found = facts.run.get("schema_version")
    if found != SCHEMA_VERSION:
        yield Reason(
            f"The run was written in schema {found}, this version reads schema {SCHEMA_VERSION}.",
            "Report with the ReuseBench version that wrote the run (see its packages), or run it again.",
        )


def _failed(facts: _Facts) -> Iterator[Reason]:
    if facts.run.get("status") == "failed":
        yield Reason(
            "The run stopped with an error.", f"Read its message, cure the cause, then {facts.resume}."
        )


def _incomplete(facts: _Facts) -> Iterator[Reason]:
    short = {
        name: (len(cell.attempted), cell.planned)
        for name, cell in facts.cells.items()
        if len(cell.attempted) < (cell.planned or 0)
    }
    if short:
        listed = ", ".join(f"{name} {done} of {planned}" for name, (done, planned) in short.items())
        yield Reason(f"Requests are still to be sent: {listed}.", f"Finish the run: {facts.resume}.")
    elif not facts.records:
        yield Reason("Nothing was measured.", f"Start the run: {facts.resume}.")


def _coverage(facts: _Facts) -> Iterator[Reason]:
    for name, cell in facts.cells.items():
        done, sent = len(cell.completed), len(cell.attempted)
        if sent == 0 or done >= MIN_COVERAGE * sent:
            continue
        failures = Counter(
            (r.outcome, r.error.message[:160] if r.error else "") for r in cell.attempted if not r.completed
        )
        (outcome, message), count = failures.most_common(1)[0]
        detail = f" ({count} × {outcome}{': ' + message if message else ''})"
        yield Reason(
            f"Coverage of {name} is {done / sent:.1%}, below {MIN_COVERAGE:.0%}{detail}.",
            f"Cure the cause, then repeat the failed requests: {facts.resume}.",
        )


def _refused(facts: _Facts) -> Iterator[Reason]:
    """A request that the service or the engine would not take says nothing about a method."""
    for name, cell in facts.cells.items():
        refused = [record for record in cell.attempted if record.outcome == "refused"]
        if len(refused) > MAX_REFUSED * len(cell.attempted):
            message = refused[0].error.message[:160] if refused[0].error else "no message"
            yield Reason(
                f"{len(refused)} of {len(cell.attempted)} requests of {name} were refused ({message}).",
                "Change the engine's or the method's settings so that it takes them, then run again.",
            )


def _duplicates(facts: _Facts) -> Iterator[Reason]:
    for name, cell in facts.cells.items():
        twice = [pair for pair, n in Counter((r.sample, r.repeat) for r in cell.records).items() if n > 1]
        if twice:
            yield Reason(
                f"{name} asked {len(twice)} sample(s) more than once per repeat, such as {twice[0][0]!r}.",
                "Give the samples of the workload distinct ids, then run again.",
            )
    lines = Counter((*r.key, r.attempt) for r in facts.records if r.phase == "measure")
    doubled = sum(n > 1 for n in lines.values())
    if doubled:
        yield Reason(
            f"{doubled} request(s) were recorded twice in the same attempt.",
            "Two processes wrote into this run. Run again, with one process per run.",
        )


def _pairing(facts: _Facts) -> Iterator[Reason]:
    by_workload: dict[str, list[str]] = {}
    for config in facts.configs():
        by_workload.setdefault(config["workload"], []).append(str(config["id"]))
    for workload, names in by_workload.items():
        asked = {
            name: {(r.sample, r.repeat) for r in facts.cells[name].attempted}
            for name in names
            if len(facts.cells[name].attempted) >= (facts.cells[name].planned or 0)
        }
        first = baseline_cell(facts.run, workload)
        if first not in asked:
            first = next(iter(asked), None)
        partly = {str(config["id"]) for config in facts.configs() if config.get("first")}
        for name, samples in asked.items():
            if first is None or ((name in partly or first in partly) and samples & asked[first]):
                continue
            if samples != asked[first]:
                yield Reason(
                    f"{name} and {first} asked different samples ({len(samples - asked[first])} only in the "
                    f"first, {len(asked[first] - samples)} only in the second), so they can't be paired.",
                    "Give both cells the same selection, then run again.",
                )


def _restarts(facts: _Facts) -> Iterator[Reason]:
    for role, probe in (facts.run.get("engines") or {}).items():
        restarts = (probe or {}).get("restarts") or 0
        if restarts:
            yield Reason(
                f"The {role} engine restarted {restarts} time(s) while requests were measured.",
                "Free memory, or lower the engine's `context` or `slots`, then run again.",
            )


def _direct_hits(facts: _Facts) -> Iterator[Reason]:
    for config in facts.configs():
        if config["method"].removesuffix(SPECDEC) != "direct":
            continue
        hits = len(facts.cells[str(config["id"])].hits)
        if hits:
            yield Reason(
                f"{config['id']} shows {hits} cache hit(s), but Direct has no cache.",
                "Take the cache in front of the engine away, then run again.",
            )


def _workload_versions(facts: _Facts) -> Iterator[Reason]:
    versions = {
        name: info.get("version") for name, info in (facts.run.get("workloads") or {}).items() if info
    }
    for config in facts.configs():
        wanted = versions.get(config["workload"])
        graded = {r.grade.workload_version for r in facts.cells[str(config["id"])].records if r.grade}
        if wanted is not None and graded - {wanted}:
            yield Reason(
                f"{config['id']} was graded by version {', '.join(sorted(graded))} of {config['workload']}, "
                f"the run names version {wanted}.",
                f"Grade it anew: `reusebench score {facts.id}`.",
            )


CHECKS: tuple[Callable[[_Facts], Iterator[Reason]], ...] = (
    _schema,
    _failed,
    _incomplete,
    _coverage,
    _refused,
    _duplicates,
    _pairing,
    _restarts,
    _direct_hits,
    _workload_versions,
)

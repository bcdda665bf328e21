"""What a page shows about single cells, single requests and the environment, as names and values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cells import Pair
from bench.metrics import METRICS, Metric, score_metric
from bench.records import Record
from reports.summary import CellSummary, Summary

__all__ = ["cell_details", "command", "definitions", "environment", "examples"]

Pairs = list[tuple[str, str]]

_EXAMPLES = 3
_LONGEST_REPLY = 2_000
_MOST_REASONS = 12


def definitions(summary: Summary) -> list[Metric]:
    """Return every metric that the page uses, the workloads' scores included."""
    return [*METRICS.values(), *(score_metric(name) for name in summary.scores)]


def cell_details(row: CellSummary, scores: Sequence[str]) -> list[tuple[str, Pairs]]:
    """Return the tables of one cell: outcomes, cache events, stages, every metric."""
    outcomes = [(name.replace("_", " "), str(count)) for name, count in row.outcomes.items()]
    events: Counter[str] = Counter()
    for record in row.data.attempted:
        if record.cache is not None and record.cache.kind != "none":
            reason = f": {_short(record.cache.reason, 160)}" if record.cache.reason else ""
            events[f"{record.cache.kind}{reason}"] += 1
    cache = [(name, str(count)) for name, count in events.most_common(_MOST_REASONS)]
    if len(events) > _MOST_REASONS:
        rest = events.total() - sum(count for _, count in events.most_common(_MOST_REASONS))
        cache.append((f"{len(events) - _MOST_REASONS} further reasons", str(rest)))
    stages = [(name, f"{seconds * 1000:.2f} ms") for name, seconds in row.stages.items()]
    errors = Counter(
        f"{record.outcome}: {_short(record.error.message, 160)}"
        for record in row.data.records
        if record.error
    )
    metrics = [*METRICS.values(), *(score_metric(name) for name in scores)]
    numbers = [
        (metric.name, f"{metric.format(row.values[metric.key])} {metric.display_unit}".strip())
        if row.values[metric.key] is not None
        else (metric.name, "n/a")
        for metric in metrics
    ]
    tables: list[tuple[str, Pairs]] = [("Outcomes", outcomes)]
    if errors:
        tables.append(("Errors", [(name, str(count)) for name, count in errors.most_common(_MOST_REASONS)]))
    if row.data.caches:
        tables.append(("Cache events", cache))
    if stages:
        tables.append(("Stages, mean per request", stages))
    tables.append(("Every metric", numbers))
    return tables


def examples(row: CellSummary) -> list[dict[str, Any]]:
    """Return a few requests of a cell: false hits first, then wrong ones, then failures, then the rest."""
    known: Mapping[Pair, bool] = row.data.baseline_right or {}

    def rank(record: Record) -> tuple[int, int]:
        if row.data.right(record):
            return 3, record.index
        if record.hit and known.get((record.sample, record.repeat), False):
            return 0, record.index
        return (1 if record.completed else 2), record.index

    return [_example(row, record) for record in sorted(row.data.attempted, key=rank)[:_EXAMPLES]]


def _example(row: CellSummary, record: Record) -> dict[str, Any]:
    facts = [record.outcome.replace("_", " "), f"{record.latency_ns / 1e9:.2f} s"]
    if record.cache is not None and record.cache.kind != "none":
        facts.append(
            record.cache.kind + (f" ({_short(record.cache.reason, 200)})" if record.cache.reason else "")
        )
    if record.error is not None:
        facts.append(f"{record.error.type}: {_short(record.error.message, 300)}")
    extracted = record.grade.extracted if record.grade else None
    verdict = "Right" if row.data.right(record) else "Wrong"
    return {
        "verdict": verdict if record.grade else "No grade",
        "sample": record.sample,
        "facts": ", ".join(facts),
        "explanation": _short(record.grade.explanation, 500) if record.grade else "",
        "extracted": "" if extracted is None else _short(_text(extracted), 300),
        "reply": None if record.reply is None else _short(record.reply, _LONGEST_REPLY),
    }


def _short(text: str | None, limit: int) -> str:
    text = text or ""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def environment(run: Mapping[str, Any]) -> list[tuple[str, Pairs]]:
    """Return what produced the numbers: machine, code, engines, workloads, data, packages."""
    git = run.get("git") or {}
    machine = dict(run.get("machine") or {})
    ram = machine.pop("ram_bytes", None)
    if ram:
        machine["ram"] = f"{ram / 2**30:.1f} GiB"
    code = {
        "commit": git.get("commit") or "not under git",
        "uncommitted changes": "n/a" if git.get("dirty") is None else "yes" if git["dirty"] else "no",
        "schema": run.get("schema_version"),
    }
    tables = [("Machine", _flat(machine)), ("Code", _flat(code))]
    for role, probe in (run.get("engines") or {}).items():
        tables.append((f"Engine: {role}", _flat(probe) if probe else [("engine", "not used")]))
    for name, facts in (run.get("workloads") or {}).items():
        tables.append((f"Workload: {name}", _flat(facts)))
    seen: dict[str, list[str]] = {}
    for cell, facts in (run.get("datasets") or {}).items():
        seen.setdefault(json.dumps(facts, sort_keys=True, default=str), []).append(cell)
    for facts, cells in seen.items():
        tables.append((f"Data: {', '.join(cells)}", _flat(json.loads(facts))))
    tables.append(("Packages", _flat(run.get("packages") or {})))
    return tables


def _flat(values: Mapping[str, Any], lead: str = "") -> Pairs:
    pairs: Pairs = []
    for key, value in values.items():
        name = f"{lead}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{name}: ")
        elif isinstance(value, list | tuple):
            pairs.append((name, "; ".join(_text(one) for one in value) or "none"))
        else:
            pairs.append((name, "n/a" if value is None else _text(value)))
    return pairs


def command(run: Mapping[str, Any]) -> str | None:
    """Return the command that repeats the run; None for one that only its configuration describes."""
    given = run.get("command")
    if given:
        return given if isinstance(given, str) else " ".join(str(part) for part in given)
    experiment = (run.get("experiment") or {}).get("id")
    if not experiment or experiment == "adhoc":
        return None
    return f"reusebench reproduce {experiment} --profile {run.get('profile') or 'laptop'}"

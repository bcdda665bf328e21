"""A run in numbers: one row per cell, its comparison with the baseline, and the paper's values beside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from bench.cells import CellData, baseline_cell, cells_of
from bench.metrics import interval, outcome_counts, stage_seconds, values_of
from bench.records import BackgroundRecord, Record
from bench.registry import SPECDEC
from bench.statistics import Estimate, holm, mcnemar, paired_difference, paired_ratio, wilson
from reports.verdict import MIN_COVERAGE, verdict

__all__ = [
    "PAPER_NOTE",
    "CellSummary",
    "Comparison",
    "PaperValues",
    "Summary",
    "Twin",
    "display_name",
    "source_label",
    "summarize",
    "verdict",
]

PAPER_NOTE = (
    "The paper measured other models on other hardware. Compare ratios (speed-up) and orderings with ours, "
    "not seconds or percentages."
)

DRIFT = 0.03
"""Cells run one after the other: a ratio this close to one may be the machine's drift and not the method."""

_NAMES = {
    "direct": "Direct",
    "pot": "PoT",
    "exactcache": "ExactCache",
    "gptcache": "GPTCache",
    "gencache": "GenCache",
    "minicache": "MiniCache",
    "specdec": "SpecDec",
    "gencache-feedback": "GenCache-feedback",
    "minicache-all-spans": "MiniCache-all-spans",
    "minicache-antiunify": "MiniCache-antiunify",
    "minicache-guarded": "MiniCache-guarded",
    "minicache-no-backoff": "MiniCache, no backoff",
    "minicache-no-reflection": "MiniCache, no reflection",
    "minicache-no-small-model": "MiniCache, no small model",
    "minicache-no-validation": "MiniCache, no validation",
    "minicache-oracle-groups": "MiniCache, oracle groups",
    "direct-small": "Direct-small",
    "pot-small": "PoT-small",
}


@dataclass(frozen=True)
class Comparison:
    """A cell against its workload's baseline, paired by sample and repeat within one run.

    Attributes:
        speedup: Baseline's mean latency / this cell's, over pairs that both answered; above 1 is faster.
        accuracy_difference: This accuracy − the baseline's over pairs that both attempted, in [-1, 1].
        p: Exact McNemar p; None where scores are graded rather than right or wrong.
        p_holm: The same after Holm's correction over the workload's methods.
        clusters: Groups that the bootstrap draws (samples, where they have no group).
        warm_speedup: As ``speedup``, over the requests after the cell's last new cache entry; None where
            there was none.
    """

    speedup: Estimate | None
    accuracy_difference: Estimate | None
    p: float | None
    p_holm: float | None
    clusters: int
    warm_speedup: Estimate | None = None

    @property
    def accuracy_decided(self) -> bool:
        """Whether the data support a difference: interval off zero, and Holm's p (if any) below 0.05."""
        off_zero = self.accuracy_difference is not None and self.accuracy_difference.excludes(0)
        return off_zero and (self.p_holm is None or self.p_holm < 0.05)

    @property
    def speed_decided(self) -> bool:
        """Whether the data support a difference in mean latency: interval off one, by more than drift."""
        ratio = self.speedup
        if ratio is None or ratio.low is None or ratio.high is None:
            return False
        return ratio.low > 1 + DRIFT or ratio.high < 1 / (1 + DRIFT)


@dataclass(frozen=True)
class Twin:
    """A ``+specdec`` cell against the plain cell of the same method, paired by sample and repeat.

    Attributes:
        flips: Share of samples whose answers (what grading extracted; the reply, where nothing was graded)
            differ. In theory none: speculative decoding changes no token.
        speedup: Plain mean latency / this one's; above 1 is faster.
    """

    flips: Estimate | None
    speedup: Estimate | None


@dataclass(frozen=True)
class PaperValues:
    """What the paper states for this method and workload; fractions in [0, 1], seconds, None for not stated.

    ``speedup`` is derived by us: the paper's baseline latency / its latency of this method. ``cache_gen``:
    entries accepted and attempted.
    """

    accuracy: float | None = None
    latency_s: float | None = None
    hit_rate: float | None = None
    hit_accuracy: float | None = None
    speedup: float | None = None
    cache_gen: tuple[int, int] | None = None

    @property
    def empty(self) -> bool:
        """Whether the paper states nothing."""
        return self == PaperValues()


@dataclass(frozen=True)
class CellSummary:
    """One row.

    Attributes:
        cell: The cell's id.
        method: Registered name, or the cell's label: what rows are called.
        name: The same for display.
        workload: Registered name.
        is_baseline: Whether the others of this workload are compared with it.
        data: Its records.
        values: Every metric by key, in the metric's unit.
        intervals: Accuracy, scores, hit rates and latencies with their intervals.
        outcomes: How many requests ended how.
        stages: Mean seconds per request in each stage.
        unranked: Why the row is not ranked; empty where it is.
        comparison: None for the baseline, or without one.
        paper: The paper's values; None without a paper.
        twin: Against the plain cell of the same method; None where this is none with speculative decoding.
    """

    cell: str
    method: str
    name: str
    workload: str
    is_baseline: bool
    data: CellData = field(repr=False)
    values: Mapping[str, float | None] = field(repr=False)
    intervals: Mapping[str, Estimate | None] = field(repr=False)
    outcomes: Mapping[str, int]
    stages: Mapping[str, float]
    unranked: str
    comparison: Comparison | None = None
    paper: PaperValues | None = None
    twin: Twin | None = None

    @property
    def n(self) -> int:
        """Attempted requests."""
        return len(self.data.attempted)


@dataclass(frozen=True)
class Summary:
    """A run in numbers.

    Attributes:
        run: ``run.json``.
        title: Heading.
        source: Where the numbers come from, for every page and caption.
        valid, reasons: The verdict, computed from the records now.
        rows: One per cell, in the order of the configuration.
        scores: Names of further scores, the primary ones left out.
        baseline: Display name of the baseline, or None.
        paper_label: Heading of the paper's columns, or None where the experiment has no paper values.
    """

    run: Mapping[str, Any] = field(repr=False)
    title: str
    source: str
    valid: bool
    reasons: Sequence[Mapping[str, str]]
    rows: Sequence[CellSummary]
    scores: Sequence[str]
    baseline: str | None
    paper_label: str | None

    @property
    def workloads(self) -> list[str]:
        """Names of the workloads, in order."""
        return list(dict.fromkeys(row.workload for row in self.rows))

    def of(self, workload: str) -> list[CellSummary]:
        """Return the rows of one workload."""
        return [row for row in self.rows if row.workload == workload]


def display_name(method: str) -> str:
    """Return a method's name as the papers write it: ``pot+specdec`` is ``PoT+SpecDec``."""
    return "+".join(_NAMES.get(part, part) for part in method.split("+"))


def source_label(run: Mapping[str, Any]) -> str:
    """Return where a run's numbers come from, such as ``live, laptop pair on this machine``."""
    kind = ((run["config"].get("pair") or {}).get("target") or {}).get("kind")
    source = run.get("source") or "unknown source"
    if kind == "mock":
        return f"{source}, mock engine: no model was asked, the numbers describe the suite only"
    profile = run.get("profile") or run["config"].get("profile") or "unnamed"
    where = " on this machine" if source == "live" else ""
    return f"{source}, {profile} pair{where}"


def summarize(
    run: Mapping[str, Any], records: Sequence[Record], background: Sequence[BackgroundRecord] = ()
) -> Summary:
    """Compute every number of a run's report from its records.

    Args:
        run: ``run.json``.
        records: Every line of ``records.jsonl``; warm-up and superseded attempts are left out here.
        background: Every line of ``background.jsonl``.
    """
    cells = cells_of(run, records, background)
    configs = {str(config["id"]): config for config in run["config"]["cells"]}
    primaries = {cell.primary for cell in cells.values()}
    names = [score for info in (run.get("workloads") or {}).values() for score in info.get("scores") or ()]
    scores = [name for name in dict.fromkeys(names) if name not in primaries]
    paper, setup = _paper(run)
    rows = [_row(run, configs[name], cells, scores, paper) for name in cells if name in configs]
    rows = [row for workload in dict.fromkeys(r.workload for r in rows) for row in _adjust(rows, workload)]
    ruling = verdict(run, records)
    experiment = run.get("experiment") or {}
    base = experiment.get("baseline") or run["config"].get("baseline")
    return Summary(
        run=run,
        title=str(experiment.get("title") or experiment.get("id") or run["id"]),
        source=source_label(run),
        valid=bool(ruling["valid"]),
        reasons=ruling["reasons"],
        rows=rows,
        scores=scores,
        baseline=display_name(str(base)) if base else None,
        paper_label=f"paper ({setup})" if any(row.paper for row in rows) else None,
    )


def _row(
    run: Mapping[str, Any],
    config: Mapping[str, Any],
    cells: Mapping[str, CellData],
    scores: Sequence[str],
    paper: Mapping[str, Mapping[str, Any]],
) -> CellSummary:
    cell, workload = cells[str(config["id"])], str(config["workload"])
    method = str(config.get("label") or config["method"])
    base = baseline_cell(run, workload)
    plain = _twin_cell(run, config)
    keys = [
        "accuracy",
        "accuracy_completed",
        "hit_rate",
        "hit_rate_with_entry",
        "hit_accuracy",
        "miss_accuracy",
        "false_hit_rate",
    ]
    keys += ["latency_mean", "latency_p50", "latency_p90", "latency_p99", *(f"score_{s}" for s in scores)]
    is_baseline = base == cell.id
    return CellSummary(
        cell=cell.id,
        method=method,
        name=display_name(method),
        workload=workload,
        is_baseline=is_baseline,
        data=cell,
        values=values_of(cell, scores),
        intervals={key: interval(cell, key) for key in keys},
        outcomes=outcome_counts(cell),
        stages=stage_seconds(cell),
        unranked=_unranked(cell),
        comparison=None if base is None or is_baseline else _compare(cell, cells[base]),
        paper=_paper_values(paper.get(workload), method, run),
        twin=None if plain is None else _against_twin(cell, cells[plain]),
    )


def _unranked(cell: CellData) -> str:
    if not cell.attempted:
        return "not run"
    planned = max(cell.planned or 0, len(cell.attempted))
    if len(cell.attempted) < planned:
        return f"incomplete: {len(cell.attempted)} of {planned}"
    coverage = len(cell.completed) / planned
    return f"coverage {coverage:.1%}" if coverage < MIN_COVERAGE else ""


def _compare(cell: CellData, base: CellData) -> Comparison | None:
    theirs = {(r.sample, r.repeat): r for r in base.attempted}
    pairs = [(r, theirs[r.sample, r.repeat]) for r in cell.attempted if (r.sample, r.repeat) in theirs]
    if not pairs:
        return None
    difference = p = None
    if cell.graded and base.graded:
        ours_scores, base_scores = [cell.score(a) for a, _ in pairs], [base.score(b) for _, b in pairs]
        difference = paired_difference(ours_scores, base_scores, _clusters(pairs))
        if {*ours_scores, *base_scores} <= {0.0, 1.0}:
            # Copies of one question are no further evidence: the exact test takes each question once.
            first = list({ours.question: at for at, (ours, _) in reversed(list(enumerate(pairs)))}.values())
            p = mcnemar([ours_scores[at] == 1 for at in first], [base_scores[at] == 1 for at in first])
    ours_ok, base_ok = {r.key for r in cell.answered}, {r.key for r in base.answered}
    both = [(a, b) for a, b in pairs if a.key in ours_ok and b.key in base_ok]
    speedup = paired_ratio([b.latency_ns for _, b in both], [a.latency_ns for a, _ in both], _clusters(both))
    warm = [(a, b) for a, b in both if cell.warm_ns is not None and a.times.scheduled >= cell.warm_ns]
    warm_speedup = paired_ratio(
        [b.latency_ns for _, b in warm], [a.latency_ns for a, _ in warm], _clusters(warm)
    )
    return Comparison(speedup, difference, p, None, len(set(_clusters(pairs))), warm_speedup)


def _twin_cell(run: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the id of the plain cell of a ``+specdec`` cell's method; unlabelled cells go first."""
    method = str(config["method"])
    if not method.endswith(SPECDEC):
        return None
    wanted = {**config, "method": method.removesuffix(SPECDEC)}
    same = ("method", "workload", "method_config")
    found = [c for c in run["config"]["cells"] if all(c.get(key) == wanted.get(key) for key in same)]
    found.sort(key=lambda cell: cell.get("label") is not None)
    return str(found[0]["id"]) if found else None


def _against_twin(cell: CellData, twin: CellData) -> Twin | None:
    """Compare a ``+specdec`` cell with the plain one of the same method."""
    theirs = {(r.sample, r.repeat): r for r in twin.answered}
    pairs = [(r, theirs[r.sample, r.repeat]) for r in cell.answered if (r.sample, r.repeat) in theirs]
    if not pairs:
        return None
    flips = sum(_answer(ours) != _answer(plain) for ours, plain in pairs) / len(pairs)
    distinct = len({ours.question for ours, _ in pairs})
    speedup = paired_ratio(
        [plain.latency_ns for _, plain in pairs], [ours.latency_ns for ours, _ in pairs], _clusters(pairs)
    )
    return Twin(wilson(flips * distinct, distinct), speedup)


def _answer(record: Record) -> Any:
    return record.reply if record.grade is None else record.grade.extracted


def _clusters(pairs: Sequence[tuple[Record, Record]]) -> list[tuple[str, str]]:
    return [("group", ours.group) if ours.group else ("question", ours.question) for ours, _ in pairs]


def _adjust(rows: Sequence[CellSummary], workload: str) -> list[CellSummary]:
    mine = [row for row in rows if row.workload == workload]
    adjusted = holm([row.comparison.p if row.comparison else None for row in mine])
    return [
        replace(row, comparison=replace(row.comparison, p_holm=p)) if row.comparison else row
        for row, p in zip(mine, adjusted, strict=True)
    ]


def _paper(run: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the paper's methods per workload and its setup in words.

    The experiment may carry its mapping (``paper_values``: workload to ``paper.table``); otherwise the
    workload's own name is looked up in the tables of the MiniCache paper.
    """
    text = resources.files("bench").joinpath("paper_values.json").read_text(encoding="utf-8")
    everything: dict[str, Any] = json.loads(text)
    experiment = run.get("experiment") or {}
    mapping: dict[str, str] = dict(experiment.get("paper_values") or {})
    if not mapping and experiment.get("paper"):
        workloads = {str(cell["workload"]) for cell in run["config"]["cells"]}
        mapping = {name: f"minicache.{name}" for name in workloads}
    found: dict[str, dict[str, Any]] = {}
    setups: dict[str, None] = {}
    for workload, path in mapping.items():
        source, _, table = path.partition(".")
        values = everything.get(source, {}).get(table)
        if isinstance(values, dict):
            found[workload] = values
            setup = everything[source].get("setup", {})
            parts = [setup.get("target"), str(setup.get("gpu") or "").split(" ")[0]]
            setups[", ".join(part for part in parts if part) or source] = None
    return found, "; ".join(setups)


def _paper_values(table: Mapping[str, Any] | None, method: str, run: Mapping[str, Any]) -> PaperValues | None:
    if table is None:
        return None
    mine = table.get(method)
    if not isinstance(mine, dict):
        return PaperValues()
    base = (run.get("experiment") or {}).get("baseline") or run["config"].get("baseline")
    base_latency = (table.get(base) or {}).get("latency_s") if base else None
    latency = mine.get("latency_s")

    def share(key: str) -> float | None:
        value = mine.get(key)
        return None if value is None else float(value) / 100

    return PaperValues(
        accuracy=share("accuracy"),
        latency_s=latency,
        hit_rate=share("hit"),
        hit_accuracy=share("hit_accuracy"),
        cache_gen=tuple(mine["cache_gen"]) if "cache_gen" in mine else None,
        speedup=base_latency / latency if base_latency and latency and method != base else None,
    )

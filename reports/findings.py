"""The findings of a run in sentences: nothing is said that an interval does not support."""

from __future__ import annotations

from functools import partial

from bench.statistics import Estimate, format_number
from reports.summary import CellSummary, Summary

__all__ = ["findings"]


def findings(summary: Summary) -> list[str]:
    """Return one sentence on each workload's baseline and one on each other method, as plain text."""
    if not summary.valid:
        return ["This run is INVALID: its numbers help to find the cause, and no finding is drawn from them."]
    sentences = []
    several = len(summary.workloads) > 1
    for workload in summary.workloads:
        rows = summary.of(workload)
        lead = f"On {workload}, " if several else ""
        for row in sorted(rows, key=lambda r: not r.is_baseline):
            sentence = _baseline(row) if row.comparison is None else _compared(row, str(summary.baseline))
            sentences.append(lead + sentence if lead else sentence)
    return sentences


def _baseline(row: CellSummary) -> str:
    if row.unranked:
        return f"{row.name} is not ranked ({row.unranked})."
    role = " (the baseline)" if row.is_baseline else ""
    accuracy, mean = row.intervals.get("accuracy"), row.intervals.get("latency_mean")
    right = "is not graded" if accuracy is None else f"is right on {_percent(accuracy)} of {row.n} requests"
    speed = "" if mean is None else f" and takes {_range(mean, 1, 2, ' s')} on average"
    return f"{row.name}{role} {right}{speed}."


def _compared(row: CellSummary, baseline: str) -> str:
    compared = row.comparison
    if compared is None or row.unranked:
        return f"{row.name} is not ranked ({row.unranked})."
    accuracy = row.intervals.get("accuracy")
    right = "" if accuracy is None else f" is right on {_percent(accuracy)};"
    return f"{row.name}{right} {_speed(row, baseline)}; {_accuracy(row, baseline)}{_hits(row)}."


def _speed(row: CellSummary, baseline: str) -> str:
    ratio = row.comparison.speedup if row.comparison else None
    if ratio is None:
        return f"its speed against {baseline} is n/a"
    if ratio.low is None or ratio.high is None:
        return f"its speed against {baseline} is undecided (paired mean ratio {ratio.value:.2f}, no interval)"
    if row.comparison is None or not row.comparison.speed_decided:
        return (
            f"whether it is faster or slower than {baseline} is undecided (paired mean ratio "
            f"{ratio.value:.2f}, 95 % CI {ratio.low:.2f}–{ratio.high:.2f})"
        )
    if ratio.value > 1:
        value, low, high, word = ratio.value, ratio.low, ratio.high, "faster"
    else:
        value, low, high, word = 1 / ratio.value, 1 / ratio.high, 1 / ratio.low, "slower"
    return f"it is {value:.2f}× {word} than {baseline} (paired mean ratio, 95 % CI {low:.2f}–{high:.2f})"


def _accuracy(row: CellSummary, baseline: str) -> str:
    compared = row.comparison
    if compared is None or compared.accuracy_difference is None:
        return "no accuracy to compare"
    difference = compared.accuracy_difference
    points = _range(difference, 100, 1, " points", sign=True)
    if not compared.accuracy_decided:
        return f"whether its accuracy differs is undecided ({points})"
    return f"it is {'more' if difference.value > 0 else 'less'} accurate ({points})"


def _hits(row: CellSummary) -> str:
    hits = row.intervals.get("hit_rate")
    if hits is None:
        return ""
    quality = row.intervals.get("hit_accuracy")
    right = "" if quality is None else f", {_percent(quality)} of those right"
    return f"; {_percent(hits)} hits{right}"


def _percent(estimate: Estimate) -> str:
    return _range(estimate, 100, 1, " %")


def _range(estimate: Estimate, scale: float, decimals: int, unit: str, *, sign: bool = False) -> str:
    number = partial(format_number, scale=scale, decimals=decimals, sign=sign)
    if estimate.low is None or estimate.high is None:
        return f"{number(estimate.value)}{unit} [n/a]"
    dash = " to " if sign else "–"
    return f"{number(estimate.value)}{unit} [{number(estimate.low)}{dash}{number(estimate.high)}]"

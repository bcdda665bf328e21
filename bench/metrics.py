"""Every number that a table may show, one small definition each.

A metric has a key, a name, a unit, a direction and a formula (its docstring), and is a function of one cell's
records. It returns None, "no value", where it does not apply or nothing was measured; never 0 for missing.
Shares are fractions in [0, 1], times are seconds.

A cell's records, and which of them are attempted, completed and answered: :mod:`bench.cells`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import getdoc
from typing import Literal

from bench.cells import CellData
from bench.method import union_ns
from bench.records import CallRecord, Record
from bench.statistics import Estimate, bootstrap_mean, quantile, wilson

__all__ = [
    "HIT_KINDS",
    "METRICS",
    "Metric",
    "interval",
    "outcome_counts",
    "score_metric",
    "stage_seconds",
    "values_of",
]

NS = 1_000_000_000
HIT_KINDS = ("exact", "semantic", "program", "kv")

Direction = Literal["higher", "lower", "none"]
Unit = Literal["count", "fraction", "s", "ms", "1/s", "tok/s", "tokens", "calls"]


@dataclass(frozen=True)
class Metric:
    """One number per cell.

    Attributes:
        key: Name in CSV files and code.
        name: Name in tables and on pages.
        unit: Unit of the raw value.
        direction: Which way is better.
        decimals: Digits after the point in tables (of the percentage, for a fraction).
        formula: What exactly it is; the function's docstring.
        function: Takes the cell, returns the value, or None for "no value".
    """

    key: str
    name: str
    unit: Unit
    direction: Direction
    decimals: int
    formula: str
    function: Callable[[CellData], float | None] = field(repr=False)

    def format(self, value: float | None) -> str:
        """Return the value as a table shows it, a fraction as percent; ``n/a`` for no value."""
        if value is None:
            return "n/a"
        return f"{value * (100 if self.unit == 'fraction' else 1):.{self.decimals}f}"

    @property
    def display_unit(self) -> str:
        """The unit that :meth:`format` uses; empty for a plain count."""
        return {"fraction": "%", "count": ""}.get(self.unit, self.unit)

    @property
    def column(self) -> str:
        """Key and unit, as a column name of a CSV file."""
        suffix = {"1/s": "per_s", "tok/s": "tok_per_s"}.get(self.unit, self.unit)
        return self.key if self.key.endswith(suffix) else f"{self.key}_{suffix}"


METRICS: dict[str, Metric] = {}
"""Every metric by key, in the order in which pages list them."""


def _metric(
    key: str, name: str, unit: Unit, direction: Direction, decimals: int = 1
) -> Callable[[Callable[[CellData], float | None]], Callable[[CellData], float | None]]:
    def register(function: Callable[[CellData], float | None]) -> Callable[[CellData], float | None]:
        formula = " ".join((getdoc(function) or "").split())
        METRICS[key] = Metric(key, name, unit, direction, decimals, formula, function)
        return function

    return register


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


@_metric("planned", "Planned", "count", "none", 0)
def _planned(cell: CellData) -> float | None:
    """Requests that the run meant to send in this cell."""
    return cell.planned


@_metric("attempted", "Attempted", "count", "none", 0)
def _attempted(cell: CellData) -> float | None:
    """Requests that were sent and not cancelled by the user; a resumed request counts once."""
    return len(cell.attempted)


@_metric("completed", "Completed", "count", "none", 0)
def _completed(cell: CellData) -> float | None:
    """Requests that the method got to answer: no infrastructure or sandbox error, no timeout."""
    return len(cell.completed)


@_metric("coverage", "Coverage", "fraction", "higher")
def _coverage(cell: CellData) -> float | None:
    """Completed / planned requests. Below 99 % a row is not ranked."""
    return _share(len(cell.completed), max(cell.planned or 0, len(cell.attempted)))


@_metric("accuracy", "Accuracy", "fraction", "higher")
def _accuracy(cell: CellData) -> float | None:
    """Mean primary score over all attempted requests; whatever failed counts as wrong. Wilson interval."""
    return _mean([cell.score(r) for r in cell.attempted]) if cell.graded else None


@_metric("accuracy_completed", "Accuracy over completed", "fraction", "higher")
def _accuracy_completed(cell: CellData) -> float | None:
    """Mean primary score over completed requests only. Wilson interval."""
    return _mean([cell.score(r) for r in cell.completed]) if cell.graded else None


@_metric("hit_rate", "Hit rate", "fraction", "higher")
def _hit_rate(cell: CellData) -> float | None:
    """Requests answered from the cache / requests with a cache event. No value without a cache."""
    known = len(cell.hits) + len(cell.misses)
    return _share(len(cell.hits), known) if cell.caches else None


def _hit_kind(kind: str) -> Callable[[CellData], float | None]:
    def rate(cell: CellData) -> float | None:
        known = len(cell.hits) + len(cell.misses)
        of_kind = sum(r.cache is not None and r.cache.kind == kind for r in cell.hits)
        return _share(of_kind, known) if cell.caches else None

    rate.__doc__ = f"Hits of kind “{kind}” / requests with a cache event."
    return rate


for _kind in HIT_KINDS:
    _metric(f"hit_rate_{_kind}", f"Hit rate, {_kind}", "fraction", "none")(_hit_kind(_kind))


@_metric("hit_accuracy", "Hit accuracy", "fraction", "higher")
def _hit_accuracy(cell: CellData) -> float | None:
    """Mean primary score over requests answered from the cache. Wilson interval."""
    return _mean([cell.score(r) for r in cell.hits]) if cell.graded else None


@_metric("miss_accuracy", "Miss accuracy", "fraction", "higher")
def _miss_accuracy(cell: CellData) -> float | None:
    """Mean primary score over requests that the cache did not answer. Wilson interval."""
    return _mean([cell.score(r) for r in cell.misses]) if cell.graded else None


def _false_hits(cell: CellData) -> tuple[int, int] | None:
    if not cell.caches or cell.baseline_right is None or not cell.graded:
        return None
    judged = [r for r in cell.hits if (r.sample, r.repeat) in cell.baseline_right]
    if cell.hits and not judged:
        return None
    false = sum(cell.baseline_right[r.sample, r.repeat] and not cell.right(r) for r in judged)
    return false, len(judged)


@_metric("false_hit_rate", "False hits per hit", "fraction", "lower")
def _false_hit_rate(cell: CellData) -> float | None:
    """Hits that are wrong where the baseline is right on the same sample / hits whose sample it completed."""
    found = _false_hits(cell)
    return None if found is None else _share(*found)


@_metric("false_hit_rate_requests", "False hits per request", "fraction", "lower")
def _false_hit_rate_requests(cell: CellData) -> float | None:
    """Hits that are wrong where the baseline is right on the same sample / attempted requests."""
    found = _false_hits(cell)
    return None if found is None else _share(found[0], len(cell.attempted))


def _latencies(cell: CellData) -> list[float]:
    return [record.latency_ns / NS for record in cell.answered]


@_metric("latency_mean", "Latency, mean", "s", "lower", 2)
def _latency_mean(cell: CellData) -> float | None:
    """Mean of finished − scheduled time over answered requests, failures apart. Bootstrap interval."""
    return _mean(_latencies(cell))


def _latency_quantile(p: float) -> Callable[[CellData], float | None]:
    def value(cell: CellData) -> float | None:
        return _value(quantile(_latencies(cell), p))

    value.__doc__ = (
        f"{p:.0%} quantile of finished − scheduled time over answered requests. Order-statistic interval; "
        "no value where the sample is too small to have one (n < 6 for p50, 29 for p90, 299 for p99)."
    )
    return value


_QUANTILES = {"latency_p50": 0.5, "latency_p90": 0.9, "latency_p99": 0.99}
for _key, _p in _QUANTILES.items():
    _metric(_key, f"Latency, p{_p * 100:.0f}", "s", "lower", 2)(_latency_quantile(_p))


def _ttfts(cell: CellData) -> list[float]:
    times = [record.times for record in cell.answered]
    return [(t.first_content - t.scheduled) / NS for t in times if t.first_content is not None]


@_metric("ttft_p50", "TTFT, p50", "s", "lower", 2)
def _ttft(cell: CellData) -> float | None:
    """Median of first answer text − scheduled time over answered, streamed requests; replies without text
    have none. No value below 6 requests.
    """
    return _value(quantile(_ttfts(cell), 0.5))


def _tpot(record: Record) -> float | None:
    calls = [c for c in record.calls if c.engine == "target" and c.purpose == "answer" and c.error is None]
    if not calls:
        return None
    call = calls[-1]
    if call.first_content is None or call.finished is None or call.tokens_out is None or call.tokens_out < 2:
        return None
    return (call.finished - call.first_content) / (call.tokens_out - 1) / NS


@_metric("tpot_p50", "TPOT, p50", "ms", "lower", 1)
def _tpot_p50(cell: CellData) -> float | None:
    """Median of (finished − first content) / (completion tokens − 1) of the target's answer call, tokens as
    the engine's usage says. No value for replies that no answer call wrote, or below 6 requests.
    """
    median = _value(quantile([v for v in map(_tpot, cell.answered) if v is not None], 0.5))
    return None if median is None else median * 1000


def _wall_s(cell: CellData) -> float | None:
    # Between two sittings of a run lie engine starts and other cells, which are not this cell's time.
    sessions: dict[int, list[Record]] = {}
    for record in cell.attempted:
        sessions.setdefault(record.session, []).append(record)
    total = sum(
        max(r.times.finished for r in records) - min(r.times.scheduled for r in records)
        for records in sessions.values()
    )
    return total / NS if total > 0 else None


def _per_second(amount: float | None, cell: CellData) -> float | None:
    wall = _wall_s(cell)
    return None if amount is None or wall is None else amount / wall


@_metric("success_per_s", "Successes per second", "1/s", "higher", 2)
def _success_per_s(cell: CellData) -> float | None:
    """Answered requests / wall time of the cell (first scheduled to last finished, per session summed)."""
    return _per_second(len(cell.answered), cell)


@_metric("attempted_per_s", "Attempts per second", "1/s", "none", 2)
def _attempted_per_s(cell: CellData) -> float | None:
    """Attempted requests, failures included / wall time of the cell."""
    return _per_second(len(cell.attempted), cell)


@_metric("output_tok_per_s", "Output tokens per second", "tok/s", "higher", 1)
def _output_tok_per_s(cell: CellData) -> float | None:
    """Completion tokens of answered requests, as the service's usage says / wall time of the cell. No value
    where an answered request came without usage.
    """
    tokens = [(record.usage or {}).get("completion_tokens") for record in cell.answered]
    if not tokens or any(count is None for count in tokens):
        return None
    return _per_second(float(sum(count for count in tokens if count is not None)), cell)


@_metric("error_rate", "Error rate", "fraction", "lower")
def _error_rate(cell: CellData) -> float | None:
    """Attempted requests that brought no whole reply (refused, failed, timed out) / attempted requests."""
    return _share(len(cell.attempted) - len(cell.answered), len(cell.attempted))


def _overhead(record: Record) -> float | None:
    begin, end = record.times.received, record.times.finished
    if begin is None:
        return None
    spans: list[tuple[int, int]] = []
    for call in record.calls:
        if call.started is None or call.finished is None:
            return None
        start, stop = max(call.started, begin), min(call.finished, end)
        if stop > start:
            spans.append((start, stop))
    return (end - begin - union_ns(spans)) / NS * 1000


@_metric("overhead_p50", "Method overhead, p50", "ms", "lower", 2)
def _overhead_p50(cell: CellData) -> float | None:
    """Median of service time (received to finished) − the union of its engine calls' intervals, over answered
    requests. No value below 6 requests.
    """
    return _value(quantile([v for v in map(_overhead, cell.traced) if v is not None], 0.5))


def _calls(cell: CellData, engine: str) -> float | None:
    if not cell.traced:
        return None
    calls = [*(call for record in cell.traced for call in record.calls), *cell.calls_beside]
    return sum(call.engine == engine for call in calls) / len(cell.traced)


@_metric("target_calls", "Target calls per request", "calls", "lower", 2)
def _target_calls(cell: CellData) -> float | None:
    """Calls to the target engine, those of work beside the requests included / answered requests."""
    return _calls(cell, "target")


@_metric("small_calls", "Small calls per request", "calls", "lower", 2)
def _small_calls(cell: CellData) -> float | None:
    """Calls to the small engine, those of work beside the requests included / answered requests."""
    return _calls(cell, "small")


def _tokens(cell: CellData, engine: str, read: Callable[[CallRecord], int | None]) -> float | None:
    totals: list[float] = []
    for record in cell.traced:
        counts = [read(call) for call in record.calls if call.engine == engine and call.error is None]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            totals.append(sum(known))
    mean = _mean(totals)
    beside = [read(call) for call in cell.calls_beside if call.engine == engine and call.error is None]
    return None if mean is None else mean + sum(count or 0 for count in beside) / len(cell.traced)


@_metric("target_tokens_in", "Target prompt tokens per request", "tokens", "lower", 0)
def _target_tokens_in(cell: CellData) -> float | None:
    """Mean prompt tokens of all target calls per answered request, work beside the requests
    included; unknown counts are left out.
    """
    return _tokens(cell, "target", lambda call: call.tokens_in)


@_metric("target_tokens_out", "Target completion tokens per request", "tokens", "lower", 1)
def _target_tokens_out(cell: CellData) -> float | None:
    """Mean completion tokens of all target calls per answered request, work beside the requests
    included; unknown counts are left out.
    """
    return _tokens(cell, "target", lambda call: call.tokens_out)


@_metric("small_tokens_in", "Small prompt tokens per request", "tokens", "lower", 0)
def _small_tokens_in(cell: CellData) -> float | None:
    """Mean prompt tokens of all small-engine calls per answered request, work beside the requests
    included; unknown counts are left out.
    """
    return _tokens(cell, "small", lambda call: call.tokens_in)


@_metric("small_tokens_out", "Small completion tokens per request", "tokens", "lower", 1)
def _small_tokens_out(cell: CellData) -> float | None:
    """Mean completion tokens of all small-engine calls per answered request, work beside the requests
    included; unknown counts are left out.
    """
    return _tokens(cell, "small", lambda call: call.tokens_out)


def _generated(cell: CellData, key: str) -> float | None:
    made = [work for work in cell.background if work.name == "generate" and work.outcome == "ok"]
    return sum(int(work.details.get(key, 0)) for work in made) if made else None


@_metric("cache_gen_accepted", "Entries accepted", "count", "none", 0)
def _cache_gen_accepted(cell: CellData) -> float | None:
    """Cache entries that were installed: a in the papers' Cache Gen. a/b. No value without a generation."""
    return _generated(cell, "accepted")


@_metric("cache_gen_attempted", "Entries attempted", "count", "none", 0)
def _cache_gen_attempted(cell: CellData) -> float | None:
    """Cache entries that were written, usable or not: b in the papers' Cache Gen. a/b."""
    return _generated(cell, "attempted")


@_metric("background_s", "Work beside the requests", "s", "lower", 1)
def _background_s(cell: CellData) -> float | None:
    """Time in which the method had an engine call under way for work that no request waits for. No value
    without such work.
    """
    spans = [(c.started, c.finished) for c in cell.calls_beside]
    known = [(start, end) for start, end in spans if start is not None and end is not None]
    return union_ns(known) / NS if cell.background else None


@_metric("background_failed", "Work beside the requests, failed", "count", "lower", 0)
def _background_failed(cell: CellData) -> float | None:
    """Pieces of work beside the requests that an error ended. No value without such work."""
    return sum(work.outcome == "error" for work in cell.background) if cell.background else None


@_metric("hit_rate_with_entry", "Hit rate once there is an entry", "fraction", "higher")
def _hit_rate_with_entry(cell: CellData) -> float | None:
    """Hits / requests that came to a group with a cached program. No value for other caches."""
    led = [record for record in cell.traced if record.details.get("entry")]
    return _share(sum(record.hit for record in led), len(led))


def _engine_ns(calls: Iterable[CallRecord]) -> int:
    known = [(c.started, c.finished) for c in calls]
    return sum(end - start for start, end in known if start is not None and end is not None)


@_metric("break_even_requests", "Break-even requests", "count", "lower", 0)
def _break_even(cell: CellData) -> float | None:
    """The number of requests after which the method has used no more engine time than the baseline on the
    same requests, for good: the sum of its requests' engine calls and of all work beside them that had begun,
    against the baseline's. No value where that does not happen, or without a cache.
    """
    theirs = cell.baseline_engine_ns
    if theirs is None or not cell.caches:
        return None
    pending = sorted(cell.background, key=lambda work: work.started)
    balance, reached = 0, None
    done = sorted(cell.completed, key=lambda record: record.times.scheduled)
    for count, record in enumerate(done, start=1):
        while pending and (count == len(done) or pending[0].started <= record.times.finished):
            balance -= _engine_ns(pending.pop(0).calls)
        balance += theirs.get((record.sample, record.repeat), 0) - _engine_ns(record.calls)
        reached = None if balance < 0 else reached or count
    return reached


def _drafts(cell: CellData) -> list[CallRecord]:
    calls = [*(call for record in cell.traced for call in record.calls), *cell.calls_beside]
    return [call for call in calls if call.engine == "target" and call.tokens_drafted is not None]


@_metric("acceptance_length", "Acceptance length", "tokens", "higher", 2)
def _acceptance_length(cell: CellData) -> float | None:
    """Completion tokens per decoding step of the target: tokens / (tokens − accepted drafts), summed over
    the target calls that were drafted for, those of work beside the requests included. A step checks some
    drafts and adds one token of its own; the prompt's step, which gives the first token, counts. 1 means that
    no draft helped. No value without speculative decoding.
    """
    known = [c for c in _drafts(cell) if c.tokens_out is not None and c.tokens_accepted is not None]
    tokens = sum(call.tokens_out or 0 for call in known)
    steps = tokens - sum(call.tokens_accepted or 0 for call in known)
    return tokens / steps if steps > 0 else None


@_metric("acceptance_rate", "Drafts accepted", "fraction", "higher")
def _acceptance_rate(cell: CellData) -> float | None:
    """Accepted / drafted tokens of the target calls. No value without speculative decoding."""
    known = [call for call in _drafts(cell) if call.tokens_accepted is not None]
    drafted = sum(call.tokens_drafted or 0 for call in known)
    return _share(sum(call.tokens_accepted or 0 for call in known), drafted)


@_metric("drafted_tokens", "Drafted tokens per request", "tokens", "none", 1)
def _drafted_tokens(cell: CellData) -> float | None:
    """Tokens that the drafter proposed / answered requests. No value without speculative decoding."""
    found = _drafts(cell)
    return sum(call.tokens_drafted or 0 for call in found) / len(cell.traced) if found else None


@_metric("cached_prompt_share", "Prompt tokens from the prefix cache", "fraction", "none")
def _cached_prompt_share(cell: CellData) -> float | None:
    """Cached / all prompt tokens of the target calls that report both."""
    calls = [call for record in cell.traced for call in record.calls if call.engine == "target"]
    known = [(c.tokens_cached, c.tokens_in) for c in calls if c.tokens_in and c.tokens_cached is not None]
    return _share(sum(cached for cached, _ in known), sum(total for _, total in known))


@_metric("retried_calls", "Retried engine calls", "count", "lower", 0)
def _retried_calls(cell: CellData) -> float | None:
    """Engine calls that needed more than one HTTP request; their waits are part of the latency."""
    if not cell.attempted:
        return None
    return sum(call.tries > 1 for record in cell.attempted for call in record.calls)


def score_metric(name: str) -> Metric:
    """Return the metric for one of a workload's scores, over all attempted requests."""

    def value(cell: CellData) -> float | None:
        graded = [r for r in cell.answered if r.grade is not None and name in r.grade.scores]
        return _mean([cell.score(r, name) for r in cell.attempted]) if graded else None

    label = name.replace("_", " ").capitalize()
    formula = (
        f"Mean “{name}” score over all attempted requests; whatever failed counts as 0. Wilson interval."
    )
    return Metric(f"score_{name}", label, "fraction", "higher", 1, formula, value)


def values_of(cell: CellData, scores: Sequence[str] = ()) -> dict[str, float | None]:
    """Return every metric's value by key, the named scores included."""
    metrics = [*METRICS.values(), *(score_metric(name) for name in scores)]
    return {metric.key: metric.function(cell) for metric in metrics}


def interval(cell: CellData, key: str) -> Estimate | None:
    """Return a metric's value with its interval, in the metric's unit; None for no value.

    Wilson for shares of requests, order statistics for latency quantiles, bootstrap for the mean latency.
    A sample that was asked in several repeats counts as one observation in a Wilson interval.

    Raises:
        KeyError: The metric has no interval defined.
    """
    if key in _QUANTILES:
        return quantile(_latencies(cell), _QUANTILES[key])
    if key == "latency_mean":
        return bootstrap_mean(_latencies(cell))
    population = {
        "accuracy": cell.attempted,
        "accuracy_completed": cell.completed,
        "hit_rate": (*cell.hits, *cell.misses),
        "hit_accuracy": cell.hits,
        "miss_accuracy": cell.misses,
        "false_hit_rate": cell.hits,
        "hit_rate_with_entry": tuple(r for r in cell.traced if r.details.get("entry")),
    }
    if key in population:
        value, members = METRICS[key].function(cell), population[key]
    elif key.startswith("score_"):
        value, members = score_metric(key.removeprefix("score_")).function(cell), cell.attempted
    else:
        raise KeyError(key)
    if value is None:
        return None
    distinct = len({record.question for record in members})
    return wilson(min(max(value, 0.0), 1.0) * distinct, distinct)


def outcome_counts(cell: CellData) -> dict[str, int]:
    """Return how many requests ended in which outcome, most frequent first."""
    return dict(Counter(record.outcome for record in cell.records).most_common())


def stage_seconds(cell: CellData) -> dict[str, float]:
    """Return the mean time per answered request in each of the method's stages, in seconds."""
    totals: dict[str, int] = {}
    for record in cell.traced:
        for stage in record.stages:
            if stage.finished is not None:
                totals[stage.name] = totals.get(stage.name, 0) + stage.finished - stage.started
    return {name: total / len(cell.traced) / NS for name, total in totals.items()}

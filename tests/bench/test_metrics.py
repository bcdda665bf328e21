from __future__ import annotations

import math
from typing import Any

import pytest

from bench.cells import CellData, baseline_cell, cells_of, latest
from bench.metrics import METRICS, NS, interval, outcome_counts, score_metric, stage_seconds, values_of
from bench.records import CacheRecord, Record, StageRecord, Times
from tests.synthetic import beside, call, grade, record, run_of


def cell(*records: Record, **changes: Any) -> CellData:
    return CellData("c", tuple(records), **{"planned": len(records), **changes})


def value(key: str, data: CellData) -> float | None:
    return METRICS[key].function(data)


def cached(kind: str, index: int, score: float = 1.0, **changes: Any) -> Record:
    return record(index=index, score=score, cache=CacheRecord(kind=kind), **changes)


def test_fault_e03_failures_are_no_successes() -> None:
    good = [record(index=i, start=float(i), latency=1.0, usage={"completion_tokens": 100}) for i in range(6)]
    bad = [record(index=6 + i, start=6.0 + i, latency=0.01, outcome="infra_error") for i in range(3)]
    last = record(index=9, start=9.99, latency=0.01, outcome="refused")
    data = cell(*good, *bad, last)
    assert value("success_per_s", data) == pytest.approx(0.6)
    assert value("attempted_per_s", data) == pytest.approx(1.0)
    assert value("output_tok_per_s", data) == pytest.approx(60)
    assert value("error_rate", data) == pytest.approx(0.4)
    assert value("latency_mean", data) == pytest.approx(1.0)
    assert value("latency_p50", data) == pytest.approx(1.0)
    assert outcome_counts(data) == {"ok": 6, "infra_error": 3, "refused": 1}
    assert value("accuracy", data) == pytest.approx(0.6)
    assert value("accuracy_completed", data) == pytest.approx(6 / 7)
    assert value("coverage", data) == pytest.approx(0.7)


def test_fault_e01_a_stream_without_text_has_no_ttft() -> None:
    silent = Times(scheduled=0, started=0, first_token=NS // 10, finished=NS)
    assert value("ttft_p50", cell(*(record(index=i, times=silent) for i in range(6)))) is None
    spoken = Times(scheduled=0, started=0, first_token=NS // 10, first_content=9 * NS // 10, finished=NS)
    mixed = [record(index=i, times=spoken if i < 6 else silent) for i in range(12)]
    assert value("ttft_p50", cell(*mixed)) == pytest.approx(0.9)


def test_latency_counts_from_the_scheduled_time() -> None:
    late = Times(scheduled=0, started=2 * NS, finished=3 * NS)
    assert value("latency_mean", cell(record(times=late))) == 3.0


def test_quantiles_have_no_value_in_small_samples() -> None:
    for key, least in (("latency_p50", 6), ("latency_p90", 29), ("latency_p99", 299)):
        records = [record(index=i, latency=1 + i / 100) for i in range(least)]
        assert value(key, cell(*records[:-1])) is None
        assert interval(cell(*records[:-1]), key) is None
        assert value(key, cell(*records)) is not None


def test_an_empty_cell_has_no_values() -> None:
    values = values_of(cell(planned=5), ["rounded"])
    assert {key for key, found in values.items() if found is not None} == {
        "planned", "attempted", "completed", "coverage"
    }  # fmt: skip
    assert values["coverage"] == 0.0
    assert all(not (isinstance(v, float) and math.isnan(v)) for v in values.values())


def test_only_failures() -> None:
    data = cell(*(record(index=i, outcome="timeout") for i in range(8)))
    assert value("accuracy", data) == 0.0
    assert value("accuracy_completed", data) is None
    assert value("latency_mean", data) is None
    assert value("error_rate", data) == 1.0
    assert value("hit_rate", data) is None
    assert value("success_per_s", data) == 0.0


def test_latest_attempt_and_measured_phase_count() -> None:
    first = record(index=0, outcome="infra_error", attempt=1)
    again = record(index=0, attempt=2)
    warm = record(index=1, phase="warmup")
    assert latest([first, warm, again]) == [again]
    assert latest([again, first]) == [again]


def test_a_cancelled_request_was_not_attempted() -> None:
    data = cell(record(index=0), record(index=1, outcome="cancelled"))
    assert value("attempted", data) == 1
    assert value("accuracy", data) == 1.0
    assert value("coverage", data) == 0.5


def test_hits_by_kind_and_their_accuracy() -> None:
    data = cell(cached("exact", 0), cached("semantic", 1, 0.0), cached("miss", 2), cached("miss", 3, 0.0))
    assert value("hit_rate", data) == 0.5
    assert value("hit_rate_exact", data) == 0.25
    assert value("hit_rate_semantic", data) == 0.25
    assert value("hit_rate_program", data) == 0.0
    assert value("hit_accuracy", data) == 0.5
    assert value("miss_accuracy", data) == 0.5


def test_no_cache_has_no_hit_rate_and_no_hits_have_no_accuracy() -> None:
    assert value("hit_rate", cell(record())) is None
    cold = cell(cached("miss", 0))
    assert value("hit_rate", cold) == 0.0
    assert value("hit_accuracy", cold) is None
    assert value("false_hit_rate", cold) is None


def test_false_hits_need_a_baseline_that_is_right() -> None:
    records = [cached("exact", 0, 0.0), cached("exact", 1, 0.0), cached("exact", 2), cached("miss", 3, 0.0)]
    right = {("s0", 0): True, ("s1", 0): False, ("s2", 0): True, ("s3", 0): True}
    data = cell(*records, baseline_right=right)
    assert value("false_hit_rate", data) == pytest.approx(1 / 3)
    assert value("false_hit_rate_requests", data) == pytest.approx(1 / 4)
    assert value("false_hit_rate", cell(*records)) is None
    assert value("false_hit_rate", cell(*records, baseline_right={})) is None


def test_tpot_is_of_the_answer_call() -> None:
    calls = (call(0, 2 * NS, first_content=NS, tokens_out=11),)
    assert value("tpot_p50", cell(*(record(index=i, calls=calls) for i in range(6)))) == pytest.approx(100)
    for odd in (call(0, NS, purpose="program"), call(0, NS, tokens_out=1), call(0, NS, first_content=None)):
        assert value("tpot_p50", cell(*(record(index=i, calls=(odd,)) for i in range(6)))) is None


def test_overhead_subtracts_the_union_of_calls() -> None:
    times = Times(scheduled=0, started=0, received=NS, finished=5 * NS)
    calls = (call(NS, 3 * NS), call(2 * NS, 4 * NS), call(0, NS))
    records = [record(index=i, times=times, calls=calls) for i in range(6)]
    assert value("overhead_p50", cell(*records)) == pytest.approx(1000)
    unknown = [record(index=i, times=Times(scheduled=0, started=0, finished=NS)) for i in range(6)]
    assert value("overhead_p50", cell(*unknown)) is None


def test_calls_and_tokens() -> None:
    two = record(index=0, calls=(call(0, NS), call(0, NS, engine="small", tokens_in=30, tokens_out=7)))
    none = cached("exact", 1, calls=())
    data = cell(two, none)
    assert value("target_calls", data) == 0.5
    assert value("small_calls", data) == 0.5
    assert value("target_tokens_in", data) == 100
    assert value("target_tokens_out", data) == 50
    assert value("small_tokens_in", data) == 15
    assert value("cached_prompt_share", data) == 0.25
    unknown = cell(record(calls=(call(0, NS, tokens_in=None, tokens_cached=None, tries=3),)))
    assert value("target_tokens_in", unknown) is None
    assert value("cached_prompt_share", unknown) is None
    assert value("retried_calls", unknown) == 1


def test_work_beside_the_requests_is_part_of_the_cost() -> None:
    requests = [record(index=i, calls=(call(0, NS, tokens_in=100, tokens_out=10),)) for i in range(2)]
    work = beside(calls=(call(0, NS, tokens_in=300, tokens_out=50), call(NS // 2, 3 * NS, engine="small")))
    data = cell(*requests, background=(work,))
    assert value("target_calls", data) == pytest.approx(1.5)
    assert value("target_tokens_in", data) == pytest.approx(250)
    assert value("target_tokens_out", data) == pytest.approx(35)
    assert value("small_calls", data) == pytest.approx(0.5)
    assert value("background_s", data) == pytest.approx(3)  # the two calls overlap
    assert value("background_s", cell(*requests)) is None


def test_entries_accepted_and_attempted() -> None:
    work = (
        beside(details={"attempted": 2, "accepted": 1}),
        beside(details={"attempted": 3, "accepted": 0}),
        beside(name="shadow", details={}),
        beside(outcome="error", details={"attempted": 9, "accepted": 9}),
        beside(outcome="cancelled", details={}),
    )
    data = cell(record(), background=work)
    assert (value("cache_gen_accepted", data), value("cache_gen_attempted", data)) == (1, 5)
    assert value("background_failed", data) == 1
    none = cell(record(), background=(beside(name="shadow", details={}),))
    assert value("cache_gen_accepted", none) is None and value("background_failed", none) == 0


def test_hits_once_there_is_an_entry() -> None:
    entry = {"entry": "group-0/1"}
    data = cell(
        cached("miss", 0),
        cached("program", 1, details=entry),
        cached("miss", 2, details=entry),
        cached("program", 3, details=entry),
        cached("program", 4, details=entry, outcome="infra_error"),
    )
    assert value("hit_rate_with_entry", data) == pytest.approx(2 / 3)
    assert value("hit_rate_with_entry", cell(cached("exact", 0))) is None


def test_break_even_is_where_the_baselines_engine_time_is_made_up_for() -> None:
    """2 s of generation beside the first request; every later hit saves a second of the baseline's."""

    def at(index: int, seconds: float, kind: str) -> Record:
        begin = 10 * index * NS
        used = (call(begin, begin + round(seconds * NS)),) if seconds else ()
        return cached(kind, index, start=10.0 * index, latency=1.0, calls=used)

    records = [at(0, 1, "miss"), *(at(i, 0, "program") for i in range(1, 5))]
    theirs = {(f"s{i}", 0): NS for i in range(5)}
    data = cell(*records, background=(beside(start=0.5, length=2),), baseline_engine_ns=theirs)
    assert value("break_even_requests", data) == 3
    late = cell(*records, background=(beside(start=25, length=3.5),), baseline_engine_ns=theirs)
    assert value("break_even_requests", late) == 5  # it was ahead before, but not for good
    never = cell(*records, background=(beside(start=35, length=9),), baseline_engine_ns=theirs)
    assert value("break_even_requests", never) is None
    assert value("break_even_requests", cell(*records)) is None


def test_speculative_decoding_counts_steps() -> None:
    first = call(0, NS, tokens_out=10, tokens_drafted=8, tokens_accepted=6)
    second = call(0, NS, tokens_out=10, tokens_drafted=4, tokens_accepted=0)
    small = call(0, NS, engine="small", tokens_out=99, tokens_drafted=99, tokens_accepted=99)
    work = beside(calls=(call(0, NS, tokens_out=20, tokens_drafted=12, tokens_accepted=10),))
    data = cell(record(calls=(first, small)), record(index=1, calls=(second,)), background=(work,))
    assert value("acceptance_length", data) == pytest.approx(40 / 24)
    assert value("acceptance_rate", data) == pytest.approx(16 / 24)
    assert value("drafted_tokens", data) == pytest.approx(12)
    plain = cell(record())
    for key in ("acceptance_length", "acceptance_rate", "drafted_tokens"):
        assert value(key, plain) is None
    untold = cell(record(calls=(call(0, NS, tokens_drafted=3, tokens_accepted=None),)))
    assert value("acceptance_length", untold) is None and value("drafted_tokens", untold) == 3


def test_throughput_leaves_the_gap_between_sessions_out() -> None:
    before = [record(index=i, start=float(i)) for i in range(9)]
    after = record(index=9, start=100.0, session=1)
    assert value("success_per_s", cell(*before, after)) == pytest.approx(1.0)


def test_missing_usage_gives_no_token_rate() -> None:
    assert value("output_tok_per_s", cell(record(usage=None), record(index=1, start=1.0))) is None


def test_scores_and_ungraded_workloads() -> None:
    data = cell(record(grade=grade(0.0, 1.0)), record(index=1, outcome="infra_error"))
    assert score_metric("rounded").function(data) == 0.5
    assert score_metric("absent").function(data) is None
    assert value("accuracy", cell(record(grade=None))) is None


def test_copies_of_a_question_are_one_observation() -> None:
    data = cell(*(record(index=i, prompt=f"p{i % 17}") for i in range(40)))
    accuracy = interval(data, "accuracy")
    assert accuracy is not None and accuracy.n == 17


def test_intervals() -> None:
    data = cell(*(record(index=i, score=float(i % 4 > 0)) for i in range(40)))
    accuracy = interval(data, "accuracy")
    assert accuracy is not None and accuracy.value == 0.75 and accuracy.n == 40
    again = cell(*data.records, *(record(index=i, repeat=1, score=float(i % 4 > 0)) for i in range(40)))
    assert interval(again, "accuracy") == accuracy
    assert interval(cell(), "accuracy") is None
    with pytest.raises(KeyError):
        interval(data, "planned")


def test_stages() -> None:
    stages = (StageRecord(name="route", started=0, finished=NS), StageRecord(name="open", started=0))
    assert stage_seconds(cell(record(stages=stages), record(index=1))) == {"route": 0.5}


def test_cells_of_a_run_know_their_baseline() -> None:
    run, records = run_of(n=6)
    cells = cells_of(run, records)
    assert list(cells) == ["formula+direct", "formula+pot", "formula+exactcache"]
    assert baseline_cell(run, "formula") == "formula+pot"
    assert baseline_cell(run, "other") is None
    right = cells["formula+exactcache"].baseline_right
    assert right is not None and len(right) == 6


def test_definitions_are_complete() -> None:
    for metric in METRICS.values():
        assert metric.formula and metric.name and metric.format(None) == "n/a"
    assert METRICS["accuracy"].format(0.7412) == "74.1"
    assert METRICS["accuracy"].column == "accuracy_fraction"
    assert METRICS["success_per_s"].column == "success_per_s"
    assert len({metric.column for metric in METRICS.values()}) == len(METRICS)

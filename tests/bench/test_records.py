from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from bench.records import CacheRecord, GradeRecord, Record, Times
from tests.synthetic import call, record


def full() -> Record:
    return record(
        group="g",
        repeat=1,
        attempt=2,
        calls=(call(1, 2), call(3, 4, error={"type": "timeout", "message": "ü \u2028"})),
        cache=CacheRecord(kind="semantic", key="k", similarity=0.5, reason="r", saved_tokens=3),
        stages=({"name": "lookup", "started": 1, "finished": None},),
        details={"nested": {"list": [1, None, "x"]}},
    )


def test_round_trip() -> None:
    one = full()
    line = one.model_dump_json()
    assert "\n" not in line
    assert Record.model_validate_json(line) == one
    assert set(json.loads(line)) == set(Record.model_fields)


def test_missing_is_null() -> None:
    bare = Record(
        run="r", cell="c", index=0, sample="s", times=Times(scheduled=0, started=0, finished=1), outcome="ok"
    )
    written = json.loads(bare.model_dump_json())
    for name in ("group", "cache", "grade", "reply", "finish_reason", "usage", "error"):
        assert written[name] is None
    assert written["times"]["first_content"] is None


def test_nan_is_never_written() -> None:
    nan = float("nan")
    odd = record(
        details={"x": nan, "y": [float("inf")]},
        usage={"cost": nan},
        cache=CacheRecord(kind="miss", similarity=nan),
    )
    line = odd.model_dump_json()

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} in {line}")

    again = json.loads(line, parse_constant=refuse)
    assert again["details"] == {"x": None, "y": [None]}
    assert again["usage"] == {"cost": None}
    assert Record.model_validate_json(line).cache == CacheRecord(kind="miss")


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_is_a_number(score: float) -> None:
    """As null it could not be read again."""
    with pytest.raises(ValidationError, match="finite"):
        GradeRecord(scores={"strict": score}, parsed=True, explanation="", workload_version="1")


def test_unknown_fields_and_outcomes_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra"):
        Record.model_validate({**full().model_dump(), "colour": "red"})
    with pytest.raises(ValidationError, match="outcome"):
        Record.model_validate({**full().model_dump(), "outcome": "fine"})


@pytest.mark.parametrize(
    ("outcome", "completed"),
    [
        ("ok", True),
        ("truncated", True),
        ("refused", True),
        ("unparsed", True),
        ("infra_error", False),
        ("sandbox_error", False),
        ("timeout", False),
        ("cancelled", False),
    ],
)
def test_completed(outcome: str, completed: bool) -> None:
    assert record(outcome=outcome).completed is completed


def test_latency_counts_from_the_schedule() -> None:
    late = record(times=Times(scheduled=10, started=25, finished=40))
    assert late.latency_ns == 30

"""What every registered workload must do, with no code of its own here."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bench.errors import UsageError
from bench.registry import names, workload
from bench.samples import Sample, last_user_text
from bench.workload import Selection, Workload

FEW = 40
GARBAGE = [
    "",
    " \n",
    "\x00\ud800",
    "</think>",
    "<think>",
    "{" * 3000,
    "9" * 5000,
    "1e999999",
    "NaN",
    "-",
    "((",
    "½%",
]

every_workload = pytest.mark.parametrize("name", names("workload"))


def samples_of(name: str, **more: Any) -> list[Sample]:
    return workload(name).load(Selection(**{"n": FEW, **more}))[0]


def gold_reply(target: Workload, sample: Sample) -> str:
    """Render the gold as an answer: in the asked format where it has one, else as it is."""
    try:
        return target.task.format_value(sample.reference)
    except ValueError:
        return str(sample.reference)


@every_workload
def test_the_facts_are_there(name: str) -> None:
    target = workload(name)
    assert isinstance(target, Workload)
    assert target.name == target.task.name == name
    assert target.version and target.primary_score
    assert target.task.miss_path in ("pot", "direct")
    assert target.task.max_tokens >= 1


@every_workload
def test_loading_is_deterministic_and_honours_the_selection(name: str) -> None:
    first, facts = workload(name).load(Selection(n=FEW, seed=5))
    again, facts_again = workload(name).load(Selection(n=FEW, seed=5))
    assert (first, facts) == (again, facts_again)
    assert len(first) == FEW
    assert len({sample.id for sample in first}) == FEW
    assert samples_of(name, seed=6) != first
    assert facts.rows >= FEW and facts.origin and len(facts.sha256) == 64
    assert len(samples_of(name, n=1)) == 1
    groups = {sample.group for sample in samples_of(name, groups=2)}
    assert len(groups) <= 2


@every_workload
@pytest.mark.parametrize("wrong", [{"split": "no such split"}, {"options": {"no_such_option": 1}}])
def test_a_senseless_selection_is_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        samples_of(name, **wrong)


@every_workload
def test_samples_are_plain_json_and_hold_their_gold_apart(name: str) -> None:
    for sample in samples_of(name):
        assert sample.messages[-1]["role"] == "user"
        whole = [list(map(dict, sample.messages)), sample.reference, sample.group, dict(sample.meta)]
        assert json.loads(json.dumps(whole, allow_nan=False)) == whole
        assert sample.reference is not None
        assert all(set(message) <= {"role", "content"} for message in sample.messages)


@every_workload
def test_the_gold_grades_as_right_and_another_samples_mostly_not(name: str) -> None:
    target = workload(name)
    samples = samples_of(name)
    golds = [gold_reply(target, sample) for sample in samples]
    for sample, gold in zip(samples, golds, strict=True):
        grade = target.grade(sample, gold)
        assert grade.parsed and grade.extracted is not None and grade.explanation
        raw = target.grade(sample, str(sample.reference))
        assert raw.scores[target.primary_score] == 1.0, (sample.id, raw)
        assert max(grade.scores.values()) == 1.0, (sample.id, grade)
    other = [
        target.grade(sample, gold).scores[target.primary_score]
        for sample, gold in zip(samples, [*golds[1:], golds[0]], strict=True)
    ]
    assert sum(other) < FEW / 2


@every_workload
def test_any_reply_is_graded(name: str) -> None:
    target = workload(name)
    sample = samples_of(name, n=1)[0]
    empty = target.grade(sample, "")
    assert not empty.parsed and set(empty.scores.values()) == {0.0}
    assert target.primary_score in empty.scores
    for reply in GARBAGE:
        grade = target.grade(sample, reply)
        assert set(grade.scores) == set(empty.scores)
        assert all(0 <= score <= 1 for score in grade.scores.values())
        assert grade == target.grade(sample, reply)
        json.dumps(grade.extracted, allow_nan=False)


@every_workload
def test_the_task_holds_no_gold(name: str) -> None:
    task = workload(name).task
    told = 0
    for sample in samples_of(name):
        instruction = task.instruction(sample.messages)
        assert instruction.strip()
        assert len(instruction) <= len(last_user_text(sample.messages))
        # A short gold ("5") can occur in a question by chance; a long one is a leak.
        text = " ".join(str(message["content"]) for message in sample.messages)
        told += len(str(sample.reference)) >= 5 and str(sample.reference) in text
    assert told <= FEW // 20


@every_workload
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_no_value_is_no_answer(name: str, value: object) -> None:
    with pytest.raises(ValueError):
        workload(name).task.format_value(value)


@every_workload
def test_an_answer_is_the_same_as_itself(name: str) -> None:
    target = workload(name)
    samples = samples_of(name)
    golds = [gold_reply(target, sample) for sample in samples]
    for gold in golds:
        assert target.task.same_answer(gold, gold)
    assert not all(target.task.same_answer(golds[0], gold) for gold in golds[1:])
    assert not target.task.same_answer(golds[0], "I can't say")

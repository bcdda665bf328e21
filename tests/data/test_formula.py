"""The Formula workload: task, loading and grading."""

from __future__ import annotations

import json
import math
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from bench.errors import DataMissing, UsageError
from bench.registry import workload
from bench.samples import Sample
from bench.workload import Selection, Workload
from data.formula import Formula
from data.formula.rows import formula_name, is_percent_formula

FORMULA = Formula()
MARGIN = (
    "Use formula Margin M to answer the question. Formula: M = (P / R) × 100, Explanation: P: profit, "
    'R: revenue. Question:  "Profit is 4 and revenue is 10.". Answer:'
)
RATIO = (
    "Use formula Ratio to answer the question. Formula: R = A / B, Explanation: -. "
    'Question: "1 by 2?"\n. Answer:'
)


def real_folder() -> Path:
    root = os.environ.get("REUSEBENCH_DATA")
    if not root or not (Path(root) / "formula" / "formula_test.jsonl").is_file():
        pytest.skip("REUSEBENCH_DATA names no folder with formula/formula_test.jsonl")
    return Path(root) / "formula"


def load_real(**settings):
    name = f"formula_{settings.get('split', 'test')}.jsonl"
    return FORMULA.load(Selection(source="path", path=str(real_folder() / name), **settings))


def sample(gold: object, context: str = RATIO, **meta: object) -> Sample:
    return Sample("s", ({"role": "user", "content": context},), gold, "g", meta)


def verdict(gold: object, reply: str, context: str = RATIO, **meta: object) -> tuple[float, ...]:
    scores = FORMULA.grade(sample(gold, context, **meta), reply).scores
    return scores["strict"], scores["rounded"], scores["corrected"]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load_file(path: str | Path, **settings):
    return FORMULA.load(Selection(source="path", path=str(path), **settings))


# --- the task


def test_is_registered_under_the_protocol():
    assert isinstance(workload("formula"), Workload)
    task = FORMULA.task
    assert (task.name, task.miss_path, task.max_tokens) == ("formula", "pot", 512)
    assert FORMULA.primary_score == "strict"


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        (MARGIN, "Margin M: Profit is 4 and revenue is 10."),
        (RATIO, "Ratio: 1 by 2?"),
        (RATIO.replace('"', ""), "Ratio: 1 by 2?"),
        ("What is 1 / 2?", "What is 1 / 2?"),
        ("Question: what?", "Question: what?"),
        ("", ""),
    ],
)
def test_instruction_is_what_varies(text, instruction):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": text})
    assert FORMULA.task.instruction(messages) == instruction


def test_instruction_of_the_built_in_frame_has_no_boilerplate():
    samples, _ = FORMULA.load(Selection(n=30))
    for each in samples:
        text = FORMULA.task.instruction(each.messages)
        assert text.startswith(f"{each.group}: ")
        assert "Symbols:" not in text
        assert "Answer:" not in text


@pytest.mark.parametrize(
    ("text", "views"),
    [
        (
            MARGIN,
            [
                ("Margin M: Formula: M = (P / R) × 100, Explanation: P: profit, R: revenue.", 0.6),
                ("Profit is # and revenue is #.", 0.4),
            ],
        ),
        (RATIO, [("Ratio: Formula: R = A / B, Explanation: -.", 0.6), ("# by #?", 0.4)]),
        ("What is €1,200 at 5% after 2 years?", [("What is # at # after # years?", 1.0)]),
        ("No number?", [("No number?", 1.0)]),
        ("", [("", 1.0)]),
    ],
)
def test_views_say_which_computation_is_asked_for(text, views):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": text})
    found = FORMULA.task.views(messages)
    assert [text for text, _ in found] == [text for text, _ in views]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in views])


def test_views_of_requests_that_differ_in_their_numbers_are_the_same():
    def views(text):
        return FORMULA.task.views(({"role": "user", "content": text},))

    other = MARGIN.replace("is 4", "is $4.5 million").replace("is 10", "is (1,200)")
    assert other != MARGIN and views(other) == views(MARGIN)
    assert views(MARGIN.replace("Profit is", "Loss is")) != views(MARGIN)
    assert views(MARGIN.replace("(P / R)", "(R / P)"))[1] == views(MARGIN)[1]
    assert views(MARGIN.replace("(P / R)", "(R / P)"))[0] != views(MARGIN)[0]


def test_the_template_s_key_is_the_formula_s_name():
    def key(text):
        return FORMULA.task.template_key(({"role": "user", "content": text},))

    assert (key(MARGIN), key(RATIO), key("What is 1 / 2?")) == ("Margin M", "Ratio", None)
    samples, _ = FORMULA.load(Selection(n=40))
    assert [FORMULA.task.template_key(each.messages) for each in samples] == [each.group for each in samples]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12, "12.00"),
        (0.625, "0.62"),
        (2.675, "2.67"),
        (-0.001, "0.00"),
        (1e9, "1000000000.00"),
        ("12.5", "12.50"),
        ("$1,200", "1200.00"),
        ("40%", "40.00%"),
        ([7.5], "7.50"),
        ((3,), "3.00"),
        (Decimal("1.10"), "1.10"),
        (Fraction(1, 4), "0.25"),
    ],
)
def test_format_value(value, text):
    assert FORMULA.task.format_value(value) == text


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, True, "no number", [1, 2], [], {}, 1j, "nan", 10**400, object()]
)
def test_format_value_refuses_what_is_no_number(value):
    with pytest.raises(ValueError, match="returned"):
        FORMULA.task.format_value(value)


def test_same_answer():
    same = FORMULA.task.same_answer
    assert same("15092.44", "The answer is $15,092.44.")
    assert same("0.40", "40%")
    assert not same("15092.44", "15090.44")
    assert not same("", "")
    assert not same("5", "-5")


# --- grading


@pytest.mark.parametrize(
    ("gold", "reply", "scores"),
    [
        ("31", "$31.00", (1, 1, 1)),
        ("31", "31.", (1, 1, 1)),
        ("31", "USD 31", (1, 1, 1)),
        ("15092.44", "**$15,092.44**", (1, 1, 1)),
        ("15092.44", "15092.4", (1, 0, 1)),
        ("0.62", "0.625", (0, 1, 0)),
        ("0.63", "0.625", (0, 1, 0)),
        ("0.1", "0.14", (0, 0, 0)),
        ("0.05", "0.0512", (0, 1, 0)),
        ("0.05", "5.12%", (0, 1, 0)),
        ("0.5", "50%", (1, 1, 1)),
        ("0.5", "50", (0, 0, 0)),
        ("10000000000.0", "$10 billion", (1, 1, 1)),
        ("-80000000.0", "-$80 million", (1, 1, 1)),
        ("-80000000.0", "$80 million", (0, 0, 0)),
        (40.0, "40", (1, 1, 1)),
    ],
)
def test_grades_of_plain_formulas(gold, reply, scores):
    assert verdict(gold, reply) == scores


@pytest.mark.parametrize(
    ("reply", "right"), [("40", 1), ("40%", 1), ("40.00%", 1), ("40 percent", 1), ("0.4", 0), ("0.4%", 0)]
)
def test_grades_of_formulas_times_100(reply, right):
    assert is_percent_formula(MARGIN)
    assert verdict("40.0", reply, MARGIN) == (right, right, right)


@pytest.mark.parametrize(
    "reply", ["", "  \n", "I can't tell.", "<think>the answer is 31</think>", "<think>31"]
)
def test_a_reply_without_an_answer_is_unparsed(reply):
    grade = FORMULA.grade(sample("31"), reply)
    assert (grade.parsed, grade.extracted, set(grade.scores.values())) == (False, None, {0.0})


def test_known_wrong_golds_are_scored_both_ways():
    assert verdict("15092.44", "974.49", erratum=974.49) == (0, 0, 1)
    assert verdict("15092.44", "15092.44", erratum=974.49) == (1, 1, 0)
    assert verdict("0.5", "0.5") == (1, 1, 1)


def test_grades_are_serialisable_and_explained():
    grade = FORMULA.grade(sample("0.62"), "0.625")
    assert json.loads(json.dumps([dict(grade.scores), grade.extracted])) == [
        {"strict": 0.0, "rounded": 1.0, "corrected": 0.0},
        0.625,
    ]
    assert grade.explanation == "read 0.625; gold 0.62: equal when rounded"


# --- files


def row(number: int, target: object = "1.0", name: str = "Ratio") -> dict[str, object]:
    context = (
        f'Use formula {name} to answer the question. Formula: R = A. Question: "A is {number}?". Answer:'
    )
    return {"context": context, "target": target}


def test_rows_keep_context_ids_and_golds(tmp_path):
    samples, facts = load_file(
        write(tmp_path / "formula_train.jsonl", row(1), row(2, 2.5)), options={"order": "file"}
    )
    assert [each.id for each in samples] == ["finlora-train-000000", "finlora-train-000001"]
    assert [each.reference for each in samples] == ["1.0", "2.5"]
    assert samples[0].messages == ({"role": "user", "content": row(1)["context"]},)
    assert (facts.source, facts.origin, facts.rows, facts.duplicates) == ("path", "formula_train.jsonl", 2, 0)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff{0}\n\n{1}\n",
        "{0}\r\n{1}\r\n",
        "{0}{1}",
        "[{0}, {1}]",
        "  {0}\n   \n  {1}",
    ],
)
def test_every_layout_of_json_is_read(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps(row(number), indent=2 if "  " in text else None) for number in (1, 2)]
    path.write_bytes(text.replace("{0}", rows[0]).replace("{1}", rows[1]).encode())
    assert len(load_file(path)[0]) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "found 0 rows in .*wanted at least 1"),
        ("[]", "found 0 rows"),
        ('{"question": "?"}', r"found \['question'\] in row 1 .*wanted \"context\""),
        ("[1]", "found int in row 1"),
        ('{"context": "c", "target": "1"}\n{"context": ', "found no valid JSON in .* line 2"),
    ],
)
def test_files_of_another_schema_are_refused(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataMissing, match=rf"Formula \(FinLoRA Financial Math\): {message}"):
        load_file(path)


@pytest.mark.parametrize("target", [None, "", "n/a", "NaN", True, [1], "inf"])
def test_rows_without_gold_are_refused_not_scored(tmp_path, target):
    path = write(tmp_path / "rows.jsonl", row(1), row(2, target), row(3, target))
    with pytest.raises(DataMissing, match="found 2 of 3 rows .* without a gold .the first is row 2"):
        load_file(path)


def test_unreadable_text_and_missing_files_are_refused(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"context": "\xe9"}')
    with pytest.raises(DataMissing, match="can't be read"):
        load_file(tmp_path / "latin.jsonl")
    with pytest.raises(DataMissing, match="found nothing at"):
        load_file(tmp_path / "absent.jsonl")


def test_duplicates_are_counted_and_marked(tmp_path):
    write(tmp_path / "formula_train.jsonl", row(1), row(9))
    again = row(1)
    again["context"] = str(again["context"]).replace("A is 1?", "a  IS 1 ?")
    samples, facts = load_file(
        write(tmp_path / "formula_test.jsonl", row(1), row(2), again), options={"order": "file"}
    )
    assert facts.duplicates == 1
    assert facts.notes[0] == "2 rows also occur in formula_train.jsonl"
    assert ["duplicate_of_earlier" in each.meta for each in samples] == [False, False, True]
    assert ["duplicate_in_other_split" in each.meta for each in samples] == [True, False, True]


def test_selection_errors(tmp_path):
    path = write(tmp_path / "rows.jsonl", row(1), row(2))
    for settings, message in [
        ({"n": 3}, "has 2 samples in 1 groups; 3 were asked for"),
        ({"n": 0}, "n = 0 asks for nothing"),
        ({"groups": 2}, "has 1 groups; 2 were asked for"),
        ({"split": "tset"}, 'no split "tset".*Did you mean "test"'),
        ({"options": {"ordre": 1}}, 'no option "ordre".*Did you mean "order"'),
        ({"options": {"order": "files"}}, 'order = "files" is unknown.*Did you mean "file"'),
    ]:
        with pytest.raises(UsageError, match=message):
            load_file(path, **settings)


# --- the real files


def test_real_test_file():
    samples, facts = load_real()
    assert (len(samples), facts.rows, facts.duplicates) == (200, 200, 0)
    assert len({each.group for each in samples}) == 50
    assert facts.sha256 == "48ed981796ec2f8ce9d5dbf36208a814ac32c3cf45b541fb9a82ea2d9655754d"
    assert all(formula_name(each.messages[0]["content"]) == each.group for each in samples)
    assert samples != load_real(seed=1)[0]
    assert [each.id for each in samples] == [each.id for each in load_real()[0]]


def test_real_selection():
    samples, _ = load_real(n=12, groups=4, seed=5)
    assert sorted(sum(each.group == name for each in samples) for name in {s.group for s in samples}) == [
        3,
        3,
        3,
        3,
    ]


def test_real_percent_formulas():
    samples, _ = load_real(split="train")
    assert {each.group for each in samples if each.meta["percent"]} == {
        "Gross Profit Margin",
        "Operating Margin",
        "Net Profit Margin",
        "Return on Assets (ROA)",
        "Return on Equity (ROE)",
        "Inflation Rate",
        "Unemployment Rate",
    }


@pytest.mark.parametrize("split", ["test", "train"])
def test_real_golds_are_right_however_they_are_written(split):
    for each in load_real(split=split)[0]:
        value = float(each.reference)
        sign, size = ("-" if value < 0 else ""), abs(value)
        replies = [
            each.reference,
            f"{sign}${size:,.2f}",
            f"The answer is {sign}${size:,.2f}.",
            rf"So we get \boxed{{{sign}{size:,.2f}}}".replace(",", "{,}"),
            f"2 + 2 = {value:.2f}",
            FORMULA.task.format_value(value),
        ]
        for reply in replies:
            scores = FORMULA.grade(each, reply).scores
            assert (scores["strict"], scores["rounded"]) == (1, 1), (each.id, reply)


def test_real_errata_are_found_and_scored():
    marked = {}
    for split in ("test", "train"):
        samples, facts = load_real(split=split)
        marked |= {each.id: each for each in samples if "erratum" in each.meta}
        assert any("known to be wrong" in note for note in facts.notes)
    assert len(marked) == 24
    campaign = marked["finlora-test-000000"]
    expected = 3500 * (1 - 1.08**-5) / 0.08 - 13000
    assert campaign.meta["erratum"] == round(expected, 2) == 974.49
    assert FORMULA.grade(campaign, "974.49").scores == {"strict": 0, "rounded": 0, "corrected": 1}
    for each in marked.values():
        assert not math.isclose(float(each.reference), each.meta["erratum"], rel_tol=1e-3)

"""The built-in Formula questions: exact golds, variety, and no way to solve them by position."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.workload import Selection
from data.formula import Formula
from data.formula.catalogue import Kind, catalogue
from data.formula.questions import LAYOUTS
from data.numbers import parse_numbers

FORMULA = Formula()
SPECS = {spec.name: spec for spec in catalogue()}
PER_GROUP = 20
NUMERALS = "one two three four five six seven eight nine ten eleven twelve"
WORDS = {word: number for number, word in enumerate(NUMERALS.split(), 1)}
PERIODS = {"yearly": 1, "half-yearly": 2, "quarterly": 4, "monthly": 12, "weekly": 52, "daily": 365}


@pytest.fixture(scope="module")
def samples():
    return FORMULA.load(Selection(n=PER_GROUP * len(SPECS)))[0]


def question(sample):
    return FORMULA.task.instruction(sample.messages).removeprefix(f"{sample.group}: ")


def by_group(samples):
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return groups


def test_catalogue_is_large_and_well_formed():
    assert len(SPECS) == len(catalogue()) >= 50
    for spec in catalogue():
        symbols = [variable.symbol for variable in spec.variables]
        assert len(set(symbols)) == len(symbols)
        assert len(spec.targets) >= 3
        assert all(len(variable.nouns) >= 1 and variable.low < variable.high for variable in spec.variables)
        for position, variable in enumerate(spec.variables):
            assert variable.share_of is None or variable.share_of in symbols[:position]


def test_default_size_and_facts():
    samples, facts = FORMULA.load(Selection())
    assert len(samples) == facts.rows == 200
    assert (facts.source, facts.origin, facts.duplicates) == ("builtin", "formula-builtin-1", 0)
    assert len({sample.id for sample in samples}) == 200


def test_a_seed_gives_the_same_samples_everywhere():
    _, facts = FORMULA.load(Selection(n=160, seed=11))
    assert facts.sha256 == "113ed88d15f0fd9e63571b8aaf5ae301fc33009edd5a2abe184ce81fe793eee4"


def test_seeds_and_splits_differ_and_sizes_nest():
    def texts(**settings):
        return {sample.messages[0]["content"] for sample in FORMULA.load(Selection(**settings))[0]}

    base = texts(n=158)
    assert len(base) == 158
    assert not base & texts(n=158, seed=1)
    assert not base & texts(n=158, split="train")
    assert base < texts(n=316)


def test_groups_are_even_and_requests_unique(samples):
    assert len({sample.messages[0]["content"] for sample in samples}) == len(samples)
    assert {len(group) for group in by_group(samples).values()} == {PER_GROUP}
    few, _ = FORMULA.load(Selection(n=30, groups=3, seed=2))
    assert sorted(len(group) for group in by_group(few).values()) == [10, 10, 10]


def test_repeats_only_when_asked():
    samples, facts = FORMULA.load(Selection(n=400, options={"repeats": 0.3}))
    texts = [sample.messages[0]["content"] for sample in samples]
    assert 400 - len(set(texts)) == facts.duplicates == sum("repeat_of" in sample.meta for sample in samples)
    assert 80 < facts.duplicates < 160
    assert len({sample.id for sample in samples}) == 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n = 0 asks for nothing"),
        ({"n": 3_000_000}, "at most 2000000"),
        ({"groups": 1000}, r"has \d+ groups; 1000 were asked for"),
        ({"options": {"repeats": 1.5}}, "repeats = 1.5 is not a share"),
        ({"options": {"order": "file"}}, 'no option "order"'),
    ],
)
def test_usage_errors(settings, message):
    with pytest.raises(UsageError, match=message):
        FORMULA.load(Selection(**settings))


def read_back(text, variable):
    """Read a written input without the code that wrote it."""
    if variable.kind is Kind.PERIODS:
        return PERIODS.get(text) or float(text.split()[0])
    if variable.kind is Kind.YEARS:
        amount, unit = text.split()
        number = WORDS.get(amount) or float(amount)
        return number / 12 if unit == "months" else number
    (quantity,) = parse_numbers(text)
    return quantity.value


def test_gold_follows_from_what_the_question_says(samples):
    for sample in samples:
        spec = SPECS[sample.group]
        text = question(sample)
        read = {}
        for variable in spec.variables:
            written = sample.meta["written"][variable.symbol]
            assert written in text, (sample.id, variable.symbol)
            read[variable.symbol] = read_back(written, variable)
            assert read[variable.symbol] == pytest.approx(sample.meta["inputs"][variable.symbol], rel=1e-12)
        assert f"{spec.solve(sample.meta['inputs']):.2f}" == sample.reference
        assert f"{spec.solve(read):.2f}" == sample.reference
        assert abs(float(sample.reference)) >= 0.1


def test_own_golds_are_right(samples):
    for sample in samples:
        for reply in (sample.reference, f"The answer is {float(sample.reference):,.2f}."):
            assert set(FORMULA.grade(sample, reply).scores.values()) == {1.0}
        assert FORMULA.grade(sample, f"{float(sample.reference) * 1.01 + 0.1:.2f}").scores["strict"] == 0


def test_known_values():
    """A few golds worked out by hand."""
    cases = {
        "Simple Interest": ({"P": 1000, "r": 0.05, "t": 2}, 100),
        "Present Value of an Annuity": ({"C": 100, "i": 0.1, "n": 2}, 173.55),
        "Level Loan Payment": ({"L": 100_000, "r": 0.06, "t": 30}, 599.55),
        "Black-Scholes Call Price": ({"S": 100, "X": 100, "r": 0.05, "s": 0.2, "t": 1}, 10.45),
        "Effective Annual Rate": ({"r": 0.12, "m": 12}, 12.68),
        "Two-Year Net Present Value": ({"C0": 100, "C1": 60, "C2": 60, "k": 0.1}, 4.13),
        "Put-Call Parity for the Put": ({"S": 100, "X": 95, "C": 30, "r": 0.02, "t": 1}, 23.14),
        "Gross Margin": ({"R": 200, "C": 150}, 25),
        "Real Output from the Deflator": ({"Y": 500, "d": 125}, 400),
        "Inventory Turnover": ({"C": 2500, "B": 600, "E": 400}, 5),
    }
    for name, (inputs, value) in cases.items():
        assert SPECS[name].solve(inputs) == pytest.approx(value, abs=0.005)


def test_every_formula_has_many_structures(samples):
    assert {sample.meta["layout"] for sample in samples} == set(LAYOUTS)
    for group in by_group(samples).values():
        assert len({sample.meta["layout"] for sample in group}) >= 6


def masked(text):
    return re.sub(r"\d[\d.,]*", "#", text.lower())


def test_position_of_a_number_does_not_say_what_it_is(samples):
    for name, group in by_group(samples).items():
        if len(SPECS[name].variables) < 2:
            continue
        orders = [tuple(sample.meta["written"]) for sample in group]
        assert all(question(s).count(w) for s in group for w in s.meta["written"].values())
        assert max(orders.count(order) for order in orders) <= 0.8 * len(orders), name
        assert len({masked(question(sample)) for sample in group}) == len(group), name


def test_a_program_keyed_to_positions_fails(samples):
    """The numbers of one question, put into another's places, seldom give the other's gold."""
    right = total = 0
    for name, group in by_group(samples).items():
        spec = SPECS[name]
        if len(spec.variables) < 3:
            continue
        for donor, taker in itertools.pairwise(group):
            values = [taker.meta["inputs"][symbol] for symbol in taker.meta["written"]]
            guess = dict(zip(donor.meta["written"], values, strict=True))
            total += 1
            try:
                right += f"{spec.solve(guess):.2f}" == taker.reference
            except (ArithmeticError, ValueError, TypeError):
                continue
    assert total > 500
    assert right / total < 0.35


def grams(text, size=3):
    words = re.findall(r"[^\W\d_]+|#", masked(text))
    return set(zip(*(words[start:] for start in range(size)), strict=False))


def overlap(groups):
    """Mean Jaccard overlap of word trigrams within groups, and across them (sampled)."""
    parts = {name: [grams(text) for text in texts] for name, texts in groups.items()}

    def jaccard(a, b):
        return len(a & b) / max(1, len(a | b))

    within = [jaccard(a, b) for group in parts.values() for a, b in itertools.combinations(group, 2)]
    chance = random.Random(0)
    pairs = (chance.sample(sorted(parts), 2) for _ in range(6000))
    across = [jaccard(chance.choice(parts[a]), chance.choice(parts[b])) for a, b in pairs]
    return sum(within) / len(within), sum(across) / len(across)


def test_wording_is_as_varied_as_the_real_files(samples):
    root = os.environ.get("REUSEBENCH_DATA")
    if not root or not (Path(root) / "formula" / "formula_train.jsonl").is_file():
        pytest.skip("REUSEBENCH_DATA names no folder with formula/formula_train.jsonl")
    real = defaultdict(list)
    for split in ("train", "test"):
        path = Path(root) / "formula" / f"formula_{split}.jsonl"
        for sample in FORMULA.load(Selection(source="path", path=str(path)))[0]:
            real[sample.group].append(question(sample))
    built = {name: [question(sample) for sample in group] for name, group in by_group(samples).items()}
    real_within, real_across = overlap(real)
    within, across = overlap(built)
    assert within <= real_within + 0.01
    assert across <= real_across + 0.01
    sentences = {text.lower() for texts in real.values() for text in texts}
    assert not sentences & {text.lower() for texts in built.values() for text in texts}


def test_meta_is_serialisable(samples):
    assert json.loads(json.dumps(dict(samples[0].meta))) == samples[0].meta

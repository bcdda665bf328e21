"""MiniCache's parts: templates, anti-unification, alignment, entries, groups, roles."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.execution import ProgramResult
from data.formula.task import FormulaTask
from methods.execution import IsolatedExecutor
from methods.minicache.alignment import align, run_program
from methods.minicache.antiunify import shape_of, shared_program
from methods.minicache.generation import (
    Entry,
    Exemplar,
    Unusable,
    generation_messages,
    read_entry,
    reflection_messages,
)
from methods.minicache.groups import Groups
from methods.minicache.roles import Roles, phrases_of
from methods.minicache.template import Refused, Template, Variable, spans_of
from methods.routing import pack_vector, unpack_vector
from tests.encoding import HashEncoder
from tests.serving import QuickExecutor

RATE = Variable("rate", "number", "yearly rate", low=0, high=1)
AMOUNT = Variable("amount", "number", "amount lent")
TERM = Variable("term", "number", "length of the loan, in years", "years")


def written(text: str) -> list[tuple[str, float]]:
    return [(span.text, float(span.quantity.exact)) for span in spans_of(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("£362,000 at 5.5%", [("362,000", 362000), ("5.5%", 0.055)]),
        ("USD 1.25m, 30,200 EUR and $2 million", [("1.25m", 1.25e6), ("30,200", 30200), ("2 million", 2e6)]),
        ("book value (EUR 106) against price (105)", [("106", 106), ("105", 105)]),
        ("| Result | (1,200) |", [("-1,200", -1200)]),
        ("Sales (R) - £482,000 and growth of -5%", [("482,000", 482000), ("-5%", -0.05)]),
        ("12 now and 12 later", [("12", 12)]),
        ("nothing to see", []),
    ],
)
def test_spans_are_a_request_s_own_values(text: str, expected: list[tuple[str, float]]) -> None:
    assert written(text) == [(span, pytest.approx(value)) for span, value in expected]


def test_a_span_knows_the_unit_of_time_after_it() -> None:
    assert [span.time for span in spans_of("18 months, 3 years, a 6-quarter plan and 5%")] == [
        "month",
        "year",
        "quarter",
        None,
    ]


def test_one_number_of_two_units_of_time_is_two_spans() -> None:
    spans = spans_of("5 funds for 12 years, then 12 months, 5 quarters and 12 more years")
    assert [(span.text, span.time) for span in spans] == [
        ("5", None),
        ("12", "year"),
        ("12 months", "month"),
        ("5 quarters", "quarter"),
    ]
    assert bind({"term": "12 months"}, "12 years, then 12 months", TERM) == {"term": 1}


def bind(answer: Any, text: str, *variables: Variable) -> dict[str, Any]:
    return Template(variables).bind(
        answer if isinstance(answer, str) else json.dumps(answer), text, spans_of(text)
    )


def test_a_value_in_brackets_after_a_name_is_not_negative() -> None:
    text = "It draws on index performance (rm) (8 %), sales (EUR 105) and a loss: (1,200)."
    assert [float(span.quantity.exact) for span in spans_of(text)] == [0.08, 105, -1200]


def test_values_are_bound_in_the_program_s_units() -> None:
    text = "Lend $2 million for 18 months at 5.5%."
    assert bind({"rate": "5.5%", "amount": "2 million", "term": "18"}, text, RATE, AMOUNT, TERM) == {
        "rate": 0.055,
        "amount": 2_000_000,
        "term": 1.5,
    }


@pytest.mark.parametrize("quoted", ["1,200", "1200", "1.2 thousand", "1200.00"])
def test_numbers_are_compared_as_numbers(quoted: str) -> None:
    assert bind({"amount": quoted}, "He lends 1,200 of 5,000.", AMOUNT) == {"amount": 1200}


@pytest.mark.parametrize(
    ("answer", "variables", "reason"),
    [
        ("no json", (AMOUNT,), "no JSON"),
        ("[1]", (AMOUNT,), "no object"),
        ({}, (AMOUNT,), "amount is missing"),
        ({"amount": 1200}, (AMOUNT,), "amount is missing"),
        ({"amount": " "}, (AMOUNT,), "amount is missing"),
        ({"amount": "1,300"}, (AMOUNT,), "not in the request"),
        ({"rate": "1,200", "amount": "1,200"}, (RATE, AMOUNT), "out of its range"),
        ({"amount": "1,200", "term": "1,200"}, (AMOUNT, TERM), "are both '1,200'"),
        ({"n": "5.5%"}, (Variable("n", "integer", "how many"),), "no whole number"),
        ({"name": "Bob"}, (Variable("name", "text", "who"),), "not in the request"),
    ],
)
def test_what_may_not_be_used_is_refused(answer: Any, variables: tuple[Variable, ...], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        bind(answer, "Ann lends 1,200 at 5.5%.", *variables)


def test_text_must_occur_only_where_it_is_quoted() -> None:
    free = Variable("name", "text", "who", quoted=False)
    assert bind({"name": "Bob"}, "Ann lends 1,200.", free) == {"name": "Bob"}
    assert bind({"name": "ann  LENDS"}, "Ann lends 1,200.", Variable("name", "text", "who")) == {
        "name": "ann  LENDS"
    }


def test_the_schema_offers_the_request_s_values_or_those_that_fit() -> None:
    template = Template((AMOUNT, RATE, Variable("name", "text", "who")))
    spans = spans_of("Ann lends 1,200 at 5.5%.")
    schema = template.schema(spans)
    assert schema["properties"]["amount"] == {"enum": ["1,200", "5.5%"]}
    assert schema["properties"]["name"]["type"] == "string"
    assert list(schema["properties"]) == schema["required"] == ["amount", "rate", "name"]
    fitting = template.schema(spans, {"amount": ["1,200"]})["properties"]
    assert (fitting["amount"], fitting["rate"]) == ({"enum": ["1,200"]}, {"enum": ["1,200", "5.5%"]})
    with pytest.raises(Refused, match="2 numbers wanted, 1 in the request"):
        template.schema(spans_of("only 5"))
    assert Template.from_json(json.loads(json.dumps(template.to_json()))) == template


# Anti-unification

MARGIN = [
    ("Sales 500, costs 300.", "sales = 500\ncosts = 300\nanswer = (sales - costs) / sales * 100"),
    (
        "Cost: 20. Turnover: 80.",
        "c = 20\nturnover = 80\nmargin = 100 * (turnover - c) / turnover\nanswer = margin",
    ),
    ("Turnover $1.5m against costs of 900,000.", "answer = round((1.5e6 - 900000) / 1.5e6 * 100, 2)"),
]


def shared(cases: list[tuple[str, str]]) -> Any:
    return shared_program([program for _, program in cases], [spans_of(text) for text, _ in cases])


def test_programs_that_compute_the_same_become_one() -> None:
    found = shared(MARGIN)
    assert found.members == (0, 1, 2)
    assert {one.name for one in found.template.numbers} == {"turnover", "costs"} or {
        one.name for one in found.template.numbers
    } == {
        "sales",
        "costs",
    }
    by_value = [sorted(shot.values()) for shot in found.shots]
    assert by_value == [["300", "500"], ["20", "80"], ["1.5m", "900,000"]]
    assert "100" in found.code and "500" not in found.code


async def test_the_shared_program_gives_each_member_its_own_answer() -> None:
    found = shared(MARGIN)
    async with IsolatedExecutor() as executor:
        for (text, program), shot in zip(MARGIN, found.shots, strict=True):
            values = found.template.bind(json.dumps(shot), text, spans_of(text))
            answer = await run_program(executor, FormulaTask(), found.code, values)
            own = await executor.run(program)
            assert FormulaTask().same_answer(answer, FormulaTask().format_value(own.value))


def test_a_program_that_computes_something_else_is_left_out() -> None:
    odd = ("Sales 70, costs 30.", "sales = 70\ncosts = 30\nanswer = (sales - costs) / costs * 100")
    assert shared([MARGIN[0], odd, MARGIN[1]]).members == (0, 2)
    assert shared([MARGIN[0], odd]) is None


def test_a_value_that_the_request_does_not_give_makes_a_program_unfit() -> None:
    slip = ("Sales 5,000, costs 300.", "sales = 500.5\ncosts = 300\nanswer = (sales - costs) / sales * 100")
    assert shape_of(slip[1], spans_of(slip[0])) is None


def test_constants_of_the_formula_are_no_parameters() -> None:
    cases = [
        ("Price 20 per month.", "price = 20\nanswer = price * 12"),
        ("Price 35 per month.", "price = 35\nanswer = price * 12"),
    ]
    found = shared(cases)
    assert [one.name for one in found.template.numbers] == ["price"] and "12" in found.code


def test_a_month_counted_in_years_is_declared_so() -> None:
    cases = [
        ("Rate 5%, 18 months.", "rate = 0.05\nyears = 18 / 12\nanswer = (1 + rate) ** years"),
        ("Rate 7%, 6 months.", "rate = 0.07\nyears = 6 / 12\nanswer = (1 + rate) ** years"),
    ]
    found = shared(cases)
    assert {v.name: v.unit for v in found.template.variables} == {"rate": "", "years": "years"}
    values = found.template.bind(
        json.dumps({"rate": "4%", "years": "30"}), "30 months at 4%", spans_of("30 months at 4%")
    )
    assert values == {"rate": 0.04, "years": 2.5}


def test_sums_over_ranges_and_calls_are_kept() -> None:
    program = (
        "fee = {}\nrate = {}\nyears = {}\nanswer = sum(fee / (1 + rate) ** t for t in range(1, years + 1))"
    )
    cases = [
        ("Fee 100, 5%, 3 years", program.format(100, 0.05, 3)),
        ("Fee 250, 8%, 7 years", program.format(250, 0.08, 7).replace(" t ", " k ").replace("** t", "** k")),
    ]
    found = shared(cases)
    assert found.members == (0, 1) and "range" in found.code


@pytest.mark.parametrize(
    "program",
    [
        "for i in range(3):\n    answer = i",
        "x = 5",
        "answer = unknown + 5",
        "answer = (lambda: 5)()",
        "def solve():\n    return 5",
        "not python",
        "answer = 1 + 1",
    ],
)
def test_what_is_no_straight_line_has_no_shape(program: str) -> None:
    assert shape_of(program, spans_of("5 and 7")) is None


def test_shapes_do_not_depend_on_the_order_of_operands() -> None:
    chance = random.Random(3)
    terms = ["a * b", "c / d", "a", "d * c * b"]
    text = "a 3, b 5, c 7, d 11"
    head = "a = 3\nb = 5\nc = 7\nd = 11\n"
    shapes = set()
    for _ in range(20):
        chance.shuffle(terms)
        shuffled = [" * ".join(chance.sample(term.split(" * "), term.count("*") + 1)) for term in terms]
        shapes.add(shape_of(head + "answer = " + " + ".join(shuffled), spans_of(text)))
    assert len(shapes) == 1 and None not in shapes


# Alignment


def entry(code: str, *variables: Variable, **more: Any) -> Entry:
    return Entry("e", Template(variables), code, **more)


def exemplar(request: str, answer: str, program: str | None = None) -> Exemplar:
    return Exemplar(request, answer, program, pack_vector(np.ones(4, dtype=np.float32) / 2))


SHARE = entry(
    "def solve(part, whole):\n    return part / whole * 100\n",
    Variable("part", "number", "the part"),
    Variable("whole", "number", "the whole"),
)


async def aligned(one: Entry, example: Exemplar) -> Any:
    return await align(QuickExecutor(), FormulaTask(), one, example, spans_of(example.request))


async def test_the_values_behind_an_answer_are_found() -> None:
    assert await aligned(SHARE, exemplar("50 of 3 shares in 200", "25.00")) == {"part": "50", "whole": "200"}
    with pytest.raises(Refused, match="no choice of its values gives its answer '26.00'"):
        await aligned(SHARE, exemplar("50 of 3 shares in 200", "26.00"))
    with pytest.raises(Refused, match="2 numbers wanted, 1"):
        await aligned(SHARE, exemplar("only 50", "25.00"))


async def test_a_program_s_names_decide_between_symmetric_choices() -> None:
    product = entry(
        "def solve(price, number):\n    return price * number\n",
        Variable("price", "number", "price"),
        Variable("number", "number", "number"),
    )
    example = exemplar("4 at 2.5 each", "10.00", "number = 4\nprice = 2.5\nanswer = price * number")
    assert await aligned(product, example) == {"price": "2.5", "number": "4"}


async def test_what_can_t_be_tried_is_not_told() -> None:
    text = entry("def solve(name):\n    return 1\n", Variable("name", "text", "who"))
    assert await aligned(text, exemplar("50 of 200", "1.00")) is None
    many = ", ".join(str(n) for n in range(101, 125))
    assert await aligned(SHARE, exemplar(many, "1.00")) is None


class Broken:
    async def run(self, code: str, *, arguments: Any = None) -> ProgramResult:
        return ProgramResult("executor_error", None, "", "gone", 1)

    async def close(self) -> None:
        pass


async def test_a_broken_executor_is_no_verdict() -> None:
    from bench.errors import ExecutorFailed

    with pytest.raises(ExecutorFailed):
        await align(Broken(), FormulaTask(), SHARE, exemplar("50 of 200", "25.00"), spans_of("50 of 200"))
    with pytest.raises(ExecutorFailed):
        await run_program(Broken(), FormulaTask(), SHARE.code, {})


# Entries

REPLY = '''```python
def solve(part: float, years: int, who: str = "me", unused: float = 0):
    """
    part: the part that is held
    `years`: how long, in years
    - who: the holder
    """
    if who: return part * years
print(solve(1, 2))
example = solve(3, 4)
```'''


def test_an_entry_is_read_from_the_target_s_reply() -> None:
    found = read_entry(REPLY, identifier="g/1", truncated=False)
    assert [(v.name, v.type, v.description, v.unit) for v in found.template.variables] == [
        ("part", "number", "the part that is held", ""),
        ("years", "integer", "how long, in years", "years"),
        ("who", "text", "the holder", ""),
    ]
    assert "print" not in found.code and "example" not in found.code and '"me"' not in found.code
    assert "import math" in found.code
    assert Entry.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I can't.", "no Python block"),
        ("```python\ndef solve(\n```", "does not parse"),
        ("```python\nanswer = 3\n```", "no function `solve`"),
        ("```python\ndef solve(*args):\n    return args[0]\n```", "name every argument"),
        ("```python\ndef solve():\n    return 3\n```", "0 arguments"),
        ("```python\ndef solve(a: list):\n    return a[0]\n```", "type list"),
    ],
)
def test_what_is_no_entry_is_unusable(reply: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        read_entry(reply, identifier="g/1", truncated=False)


def test_a_pattern_must_have_a_group_per_variable() -> None:
    def reply(pattern: str) -> str:
        return f"```python\nPATTERN = {pattern}\ndef solve(a: float):\n    return a\n```"

    def read(pattern: str) -> Entry:
        return read_entry(reply(pattern), identifier="g", truncated=False, with_pattern=True)

    assert read('r"costs (?P<a>\\\\d+)"').pattern is not None
    for wrong, reason in (
        ('r"costs (\\\\d+)"', "no group for a"),
        ('"("', "no regular expression"),
        ("3", "no PATTERN"),
    ):
        with pytest.raises(Unusable, match=reason):
            read(wrong)


def test_the_prompts_show_requests_programs_and_what_failed() -> None:
    ones = [
        exemplar("50 of 200", "25.00", "import math\nimport statistics\nanswer = 50 / 200"),
        exemplar("b", "yes"),
    ]
    system, user = generation_messages(ones, ["mind the unit"])
    assert "def solve" in system["content"] and "PATTERN" not in system["content"]
    for part in ("Request 1: 50 of 200", "answer = 50 / 200", "Answer 2: yes", "mind the unit"):
        assert part in user["content"]
    assert "import" not in user["content"]
    assert "PATTERN" in generation_messages(ones, [], with_pattern=True)[0]["content"]
    assert "it broke" in reflection_messages(None, ["it broke"])[1]["content"]


# Groups


def groups(**settings: Any) -> Groups:
    return Groups(4, **{"nu": 3, "beta": 2, "most_triggers": 2, "most_exemplars": 3, **settings})


def add(state: Groups, group: int | None, *values: float, request: str = "r") -> None:
    vector = np.array(values, dtype=np.float32)
    packed = pack_vector(vector / np.linalg.norm(vector))
    one = {"request": request, "answer": "1", "program": None, "vector": packed}
    state.apply({"op": "exemplar", "group": group, "scope": "s", "key": None, "exemplar": one})


def counted(**more: Any) -> dict[str, Any]:
    return {"group": 0, "attempted": 2, "accepted": 0, "summaries": ["why"], **more}


def test_groups_follow_their_events_and_a_snapshot_rebuilds_them_exactly() -> None:
    state = groups()
    for at in range(5):
        add(state, None if at == 0 else 0, 1, 0.1 * at, 0, 0, request=f"r{at}")
    add(state, None, 0, 0, 1, 0)
    assert [one.request for one in state.all[0].exemplars] == ["r2", "r3", "r4"]
    assert state.all[0].seen == 5
    state.apply({"op": "failed", **counted()})
    assert (state.all[0].nu, state.all[0].state) == (6, "open")
    state.apply({"op": "install", **counted(accepted=1), "entry": SHARE.to_json()})
    state.apply({"op": "hit", "group": 0, "vector": state.all[0].exemplars[0].vector})
    state.apply({"op": "refused", "group": 0})
    assert (state.all[0].state, state.all[0].hits, state.all[0].refused_in_a_row) == ("cached", 1, 1)
    copy = groups()
    for event in json.loads(json.dumps(list(state.snapshot()))):
        copy.apply(event)
    assert list(copy.snapshot()) == list(state.snapshot())
    probe = unpack_vector(state.all[0].exemplars[1].vector)
    assert copy.nearest(probe, "s") == state.nearest(probe, "s")
    assert state.nearest(probe, "another") is None
    json.dumps(state.describe())
    state.apply({"op": "evict", "group": 0, "reason": "bad"})
    assert state.all[0].state == "open" and state.all[0].summaries[-1] == "bad"
    state.apply({"op": "failed", **counted()})
    assert state.all[0].state == "uncacheable"


def test_a_group_splits_into_two() -> None:
    state = groups(most_exemplars=9)
    for at in range(4):
        add(state, None if at == 0 else 0, 1, at, 0, 0, request=f"r{at}")
    state.apply({"op": "split", "moved": [1, 3], **counted()})
    assert [[one.request for one in group.exemplars] for group in state.all] == [["r0", "r2"], ["r1", "r3"]]
    assert [group.seen for group in state.all] == [2, 2]
    assert [group.triggers for group in state.all] == [1, 1]
    assert state.index.count(1) == 2


@pytest.mark.parametrize(
    "event",
    [
        {"op": "explode"},
        {"op": "hit", "group": 0},
        {"op": "refused", "group": 1},
        {"op": "evict", "group": -1, "reason": "r"},
        {"op": "exemplar"},
        {"kind": "put"},
    ],
)
def test_an_event_that_does_not_fit_is_refused(event: dict[str, Any]) -> None:
    state = groups()
    if event.get("group"):
        add(state, None, 1, 0, 0, 0)
    with pytest.raises((KeyError, ValueError)):
        state.apply(event)


def test_a_cosine_is_never_beyond_one_whatever_the_scopes() -> None:
    chance = np.random.default_rng(2)
    for _ in range(50):
        state = Groups(96, nu=3, beta=2, most_triggers=3, most_exemplars=9)
        vector = chance.normal(size=96).astype(np.float32)
        vector /= np.linalg.norm(vector)
        packed = pack_vector(vector)
        for scope in ("a", "b"):
            one = {"request": "r", "answer": "1", "program": None, "vector": packed}
            state.apply({"op": "exemplar", "group": None, "scope": scope, "key": None, "exemplar": one})
        found = [state.nearest(vector, scope) for scope in ("a", "b")]
        assert [group for group, _ in found if group is not None] == [0, 1]
        assert all(0.999 < cosine <= 1 for _, cosine in found)


# Roles


def test_the_words_around_a_value_are_its_clause() -> None:
    text = "Known are a cost of $5 per unit, sales equal to 7 million\n- purchase price: 12%"
    assert list(phrases_of(text).values()) == [
        "Known are a cost of # per unit",
        "sales equal to #",
        "- purchase price: #",
    ]


SHOTS = (
    ("purchase cost of 500, and yearly saving of 40", {"cost": "500", "saving": "40"}),
    ("yearly saving is 7, where the cost is 90", {"cost": "90", "saving": "7"}),
)


COST, SAVING = Variable("cost", "number", "purchase cost"), Variable("saving", "number", "saving a year")


async def test_words_tell_roles_apart_or_say_that_they_do_not() -> None:
    roles = Roles(HashEncoder(), 0.05)
    found = await roles.assignment((COST, SAVING), SHOTS, "the yearly saving is 31, and the cost is 777")
    assert found == {"cost": ["777"], "saving": ["31"]}
    unclear = await roles.assignment((COST, SAVING), SHOTS, "31, and 777")
    assert unclear is not None and {len(texts) for texts in unclear.values()} == {2}
    partly = await roles.assignment((COST, SAVING), SHOTS, "purchase cost of 777, and 31, and 32")
    assert partly is not None and partly["cost"] == ["777"] and sorted(partly["saving"]) == ["31", "32"]
    assert await roles.assignment((COST, SAVING), SHOTS, "only 31") is None
    assert await roles.assignment((COST, SAVING), (), "31, and 777") is None


async def test_what_was_always_a_percentage_is_no_amount() -> None:
    rate, sum_ = Variable("rate", "number", "rate"), Variable("sum", "number", "sum")
    shots = (("here 5%, here 700", {"rate": "5%", "sum": "700"}),)
    for text in ("here 900, here 3%", "here 3%, here 900"):
        found = await Roles(HashEncoder(), 0.05).assignment((rate, sum_), shots, text)
        assert found == {"rate": ["3%"], "sum": ["900"]}
    paid, years = Variable("paid", "number", "paid"), Variable("years", "number", "years")
    shots = (("here $400, here 7", {"paid": "400", "years": "7"}),)
    for text in ("here 12, here €3 million", "here €3 million, here 12"):
        found = await Roles(HashEncoder(), 0.05).assignment((paid, years), shots, text)
        assert found == {"paid": ["3 million"], "years": ["12"]}


async def test_what_a_variable_is_called_counts() -> None:
    shots = (("first 5, second 700", {"cost": "5", "saving": "700"}),)
    for first, second, wanted in ((COST, SAVING, ["9", "8"]), (SAVING, COST, ["8", "9"])):
        named = (replace(first, name="cost"), replace(second, name="saving"))
        found = await Roles(HashEncoder(), 0.05).assignment(named, shots, "saving a year 8, purchase cost 9")
        assert found is not None and [texts[0] for texts in found.values()] == wanted


@pytest.mark.model
async def test_roles_by_the_real_encoder() -> None:
    from runners.encoder import SentenceEncoder

    shots = (
        ("A firm buys a kiln for $4,000 and saves $900 every year.", {"cost": "4,000", "saving": "900"}),
        ("Yearly savings are €70; the purchase cost €1,000.", {"cost": "1,000", "saving": "70"}),
    )
    found = await Roles(SentenceEncoder(), 0.1).assignment(
        (COST, SAVING),
        shots,
        "With an annual saving of 12,500 and an outlay of 80,000, find the payback time.",
    )
    assert found == {"cost": ["80,000"], "saving": ["12,500"]}

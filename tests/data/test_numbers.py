"""The number parser and the comparisons: every kind of spelling, with the exact value that it has."""

from __future__ import annotations

import math
import random
import time
from decimal import Decimal

import pytest

from data.numbers import (
    answer_quantity,
    as_decimal,
    fact_number,
    final_text,
    lists_match,
    numbers_match,
    parse_items,
    parse_number,
    parse_number_list,
    parse_numbers,
    same_rounded,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{$7{,}250}", 7250),
        (r"\boxed{6,000}", 6000),
        ("So the total is $7,250 in all.", 7250),
        (r"7\,250", 7250),
        (r"x = \boxed{\text{about } \$1{,}234.50}", 1234.5),
        (r"\boxed{1} no, rather \boxed{\frac{1}{2}}", 0.5),
        (r"\(15092.44\)", 15092.44),
        (r"The answer is: $\$12.5$", 12.5),
        (r"23.4 \%", 0.234),
    ],
)
def test_latex(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text", ["$31.00", "31.", "31.0", "USD 31", "31 USD", "€31", "Rs. 31", "31 €", "US$31"]
)
def test_currency_trailing_zeros_and_full_stop(text):
    assert parse_number(text) == 31
    assert numbers_match(31, answer_quantity(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1,234)", -1234),
        ("($134)", -134),
        ("$(134)", -134),
        ("(12)%", -0.12),
        ("(0.5) million", -500_000),
        ("EUR (2,410.50)", -2410.5),
        ("net income (loss) was $120", 120),
        ("net income was 120 (see note 3)", 120),
        ("-(1,234)", -1234),
        ("(-5)", -5),
        ("N(0.5)", 0.5),
        ("3 * (5)", 5),
        ("revenue in the year (2021) was 7", 7),
    ],
)
def test_accounting_parentheses(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("−5", -5),
        ("–5.5", -5.5),
        ("﹣5", -5),
        ("$-5", -5),
        ("-$5", -5),
        ("= − 5", -5),
        ("-$1,500,000.00", -1_500_000),
        ("+3", 3),
        ("-.5", -0.5),
        ("Consumption – $800 million", 8e8),
        ("from 10–20", 20),
        ("The balance is -0.01", -0.01),
    ],
)
def test_signs(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9,161,340", 9_161_340),
        ("12,34,567", 1_234_567),
        ("12 500", 12_500),
        ("12\u00a0500", 12_500),
        ("12\u202f500\u202f000", 12_500_000),
        ("1'234'567", 1_234_567),
        ("1’234", 1234),
        ("１２３．５", 123.5),
        (".5", 0.5),
        ("1.2e3", 1200),
        ("1.2E+03", 1200),
        ("1.2 × 10^3", 1200),
        ("1.2x10³", 1200),
        ("1.2x10⁻³", 0.0012),
        (r"1.2 \times 10^{-3}", 0.0012),
    ],
)
def test_digits(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5 thousand", 1500),
        ("$2 million", 2e6),
        ("£1.5bn", 1.5e9),
        ("3 trillion", 3e12),
        ("4k", 4000),
        ("5M", 5e6),
        ("$5m", 5e6),
        ("$5 M", 5e6),
        ("$5MM", 5e6),
        ("2 crore", 2e7),
        ("5 m", 5),
        ("12-month", 12),
        ("2.5x", 2.5),
    ],
)
def test_scale_words(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "fraction", "percent"),
    [
        ("23.4%", 0.234, 23.4),
        ("23.4 percent", 0.234, 23.4),
        ("23.4 per cent", 0.234, 23.4),
        ("**23.4**%", 0.234, 23.4),
        ("120 bps", 0.012, 1.2),
        ("50 basis points", 0.005, 0.5),
        ("5‰", 0.005, 0.5),
    ],
)
def test_percentages(text, fraction, percent):
    quantity = answer_quantity(text)
    assert (quantity.value, quantity.percent_value, quantity.percent) == (fraction, percent, True)


def test_percent_gold_is_neither_dropped_nor_guessed():
    replies = ["23.4%", "0.234", "23.4 percent", "2.34%", "0.234%"]
    verdicts = [numbers_match(23.4, answer_quantity(reply), scale="percent") for reply in replies]
    assert verdicts == [True, True, True, False, False]
    assert not numbers_match(40, answer_quantity("0.4"), scale="percent", plain_fraction=False)
    assert numbers_match(5, answer_quantity("5 million"), scale="million")
    assert numbers_match(5, answer_quantity("5,000,000"), scale="million")
    assert not numbers_match(5, answer_quantity("5 billion"), scale="million")


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ({"text": "(700)", "sign": "-", "scale": 0}, -700),
        ({"text": "(3,100)", "scale": 3}, -3_100_000),
        ({"text": "2.718,05", "format": "numcommadecimal", "sign": "-"}, -2718.05),
        ({"text": "2.718,05", "format": "ixt:num-comma-decimal"}, 2718.05),
        ({"text": "-", "format": "zerodash"}, 0),
        ({"text": "none"}, None),
    ],
)
def test_inline_xbrl_facts(fact, value):
    assert fact_number(**fact) == value


def test_lists_follow_the_arity_of_the_gold():
    assert lists_match([9, 161_340], "[9,161,340]")
    assert lists_match([9, 161, 340], "[9,161,340]")
    assert not lists_match([9, 161_440], "[9,161,340]")
    assert not lists_match([9, 161], "[9,161,340]")
    assert parse_number_list("[31,1877.5]") == [31, 1877.5]
    assert parse_number_list("[9, 161,340,]") == [9, 161_340]
    assert parse_number("9,161,340") == 9_161_340
    assert parse_items("ANSWER: B, C, and D") == ["B", "C", "D"]
    assert parse_items("B, C,") == ["B", "C"]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("The NPV is $15,092.44 over 5 years.", 15092.44),
        ("NPV = 13974.49 - 13000 = 974.49", 974.49),
        ("The answer is 5 × 3 = 15.", 15),
        ("Answer: 40%\nI rounded to 2 decimals.", 0.4),
        ("Final answer:\n\n12.50", 12.5),
        ("#### 42", 42),
        ("[[998000.0]]", 998_000),
        ("1. First we get 5\n2. Then 7\nThe result is 12.", 12),
        ("Step 1: 50\nStep 2: done", 50),
        ("Step 3: 4 + 4\n**8.00**", 8),
        ("0.05 (rounded to 2 decimal places)", 0.05),
        ("On March 31, 2021 the value was 55", 55),
        ("The answer is **0.62** (rounded to 2 decimal places)", 0.62),
        ("first 3, then 4, finally 6", 6),
        ("12.00\n\nExplanation: 3 apples at a price of 4.", 12),
        ("$1,200\nwhich is 12 times 100", 1200),
        ("The current ratio is 2.5:1", 2.5),
        ("```\n15092.44\n```", 15092.44),
    ],
)
def test_which_number_is_the_answer(reply, value):
    assert parse_number(reply) == value


@pytest.mark.parametrize(
    "text",
    ["", "none", "S_0, d1, CO2 and the 10-K of Q3 2021", "2021-03-04", "12:30", "12th", "1e999", "FY18"],
)
def test_names_dates_and_ordinals_are_no_answers(text):
    assert parse_number(text) is None


def test_decimal_comma_only_when_asked():
    assert parse_number("2.718,05", decimal_comma=True) == 2718.05
    assert parse_number("7,250") == 7250


def test_reasoning_is_not_read():
    assert final_text("<think>5</think>6") == "6"
    assert final_text("a</think>b</think>7") == "7"
    assert final_text("<think>5 and so on") == ""


def test_rounding_accepts_both_ways_of_ties():
    assert same_rounded(Decimal("0.62"), Decimal("0.625"), 2)
    assert same_rounded(Decimal("0.63"), Decimal("0.625"), 2)
    assert not same_rounded(Decimal("0.62"), Decimal("0.6251"), 2)
    assert as_decimal("1,200.50") == Decimal("1200.50")
    assert as_decimal("NaN") is None
    assert as_decimal("forty") is None


def test_any_text_is_read_without_an_error():
    chance = random.Random(7)
    pieces = list("0123456789.,-−–+$€£%()[]{}\\/ \n\t*#=eExXkmMbB^_'’|≈") + [
        "\\boxed{", "\\frac{1}{", "million", "USD ", "answer is", "<think>", "bps", "10^", "³", "½", "\u202f",
        "٣", "Ⅷ", "²", "\ud800", "\x00", "per cent", "jan ", "Step ", "**", "[[", "is ",
    ]  # fmt: skip
    for _ in range(3000):
        text = "".join(chance.choice(pieces) for _ in range(chance.randrange(40)))
        for decimal_comma in (False, True):
            for quantity in parse_numbers(text, decimal_comma=decimal_comma):
                assert math.isfinite(quantity.value)
            value = parse_number(text, decimal_comma=decimal_comma)
            assert value is None or math.isfinite(value)
        assert all(math.isfinite(value) for value in parse_number_list(text))
        parse_items(text)
        lists_match([1, 2], text)
        fact_number(text, sign="-", scale=3)
    for _ in range(500):
        text = "".join(chr(chance.randrange(0x110000)) for _ in range(30))
        assert parse_number(text) is None or math.isfinite(parse_number(text))


@pytest.mark.parametrize(
    "unit", ["1,", "11,", "111,", "1 ", "111 ", "(", "-", "1", ".", "1.1", "$", "\\boxed{", "answer is ", 
             "is 1 ", "= 1 ", "{", "\\frac{1}{", "#", "1e", "**1", "\n", "answer is\n1 ", "1x10^"]
)  # fmt: skip
def test_time_is_linear_in_the_length(unit):
    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        start = time.process_time()
        parse_number(text)
        return time.process_time() - start

    small = seconds(12_500)
    assert seconds(100_000) < 8 * 4 * small + 0.5

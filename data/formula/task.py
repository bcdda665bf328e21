"""What a method may know about the Formula workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from bench.quantities import normalise, scan
from bench.samples import Message, last_user_text
from data.formula.rows import formula_name
from data.numbers import answer_quantity, close

__all__ = ["FormulaTask"]

MAX_TOKENS = 512
"""A direct answer takes about 10 tokens, a program about 150; the rest is for a target that reasons aloud."""

STATEMENT_WEIGHT = 0.6
"""Weight of the formula's statement beside that of the question: the statement tells formulas apart, the
question tells what is asked of one. With it and the threshold below, requests of the built-in catalogue
(seeds 1 to 3) and of FinLoRA's training split fall into about as many groups as there are formulas; with the
whole request as one text, into two to four times as many at every threshold that does not mix formulas.
"""
SIMILARITY_THRESHOLD = 0.85


class FormulaTask:
    """Financial formulas: the answer is one number with 2 decimal places."""

    name: str = "formula"
    miss_path: Literal["pot", "direct"] = "pot"
    max_tokens: int = MAX_TOKENS
    similarity_threshold: float = SIMILARITY_THRESHOLD

    def instruction(self, messages: Sequence[Message]) -> str:
        """Return the formula's name and the question; the last user message where it has no such frame."""
        text = last_user_text(tuple(messages))
        name, _, question = _parts(text)
        return f"{name}: {question}" if name and question else text

    def views(self, messages: Sequence[Message]) -> Sequence[tuple[str, float]]:
        """Return the formula's name with its statement, and the question without its numbers."""
        text = last_user_text(tuple(messages))
        name, statement, question = _parts(text)
        if not (name and question):
            return [(_without_numbers(text), 1.0)]
        return [
            (f"{name}: {statement}", STATEMENT_WEIGHT),
            (_without_numbers(question), 1 - STATEMENT_WEIGHT),
        ]

    def template_key(self, messages: Sequence[Message]) -> str | None:
        """Return the formula's name as the request gives it."""
        return formula_name(last_user_text(tuple(messages)))

    def format_value(self, value: object) -> str:
        """Render a value with 2 decimal places; a percentage keeps its mark.

        Numbers, numeric strings ("$1,200") and a list or tuple of one of them are accepted.

        Raises:
            ValueError: No value, not finite, not one number (also for booleans, which are comparisons).
        """
        if isinstance(value, (list, tuple)) and len(value) == 1:
            return self.format_value(value[0])
        if isinstance(value, str):
            quantity = answer_quantity(value)
            if quantity is None:
                raise ValueError(f"the program returned text without a number: {value[:60]!r}")
            return f"{_fixed(quantity.percent_value)}%" if quantity.percent else _fixed(quantity.value)
        if isinstance(value, bool) or value is None:
            raise ValueError(f"the program returned {value!r}, not a number")
        if isinstance(value, (int, float, Decimal, Fraction)):
            return _fixed(value)
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "size", None) == 1:
            return self.format_value(item())
        raise ValueError(f"the program returned a {type(value).__name__}, not a number")

    def same_answer(self, a: str, b: str) -> bool:
        """Compare two replies by value, within 1e-4 relative (absolute below 1); "40%" is 0.4 here."""
        left, right = answer_quantity(a), answer_quantity(b)
        return left is not None and right is not None and close(left.value, right.value)


def _parts(text: str) -> tuple[str | None, str, str]:
    """Return the formula's name, its statement and the question, as the request's frame holds them."""
    name = formula_name(text)
    frame, found, question = text.rpartition("Question:")
    if not found:
        return name, "", ""
    question = question.rpartition("Answer:")[0] or question
    question = question.strip().removesuffix(".").strip()
    if len(question) > 1 and question[0] == question[-1] == '"':
        question = question[1:-1].strip()
    return name, frame[frame.rfind("Formula:") :].strip() if "Formula:" in frame else "", question


def _without_numbers(text: str) -> str:
    folded = normalise(text)
    pieces, end = [], 0
    for quantity in scan(folded):
        written = folded[quantity.start : quantity.end]
        pieces += [folded[end : quantity.start], written.replace(written.strip(), "#", 1)]
        end = quantity.end
    return "".join([*pieces, folded[end:]])


def _fixed(value: int | float | Decimal | Fraction) -> str:
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("the program returned a number that is too large") from error
    if not math.isfinite(number):
        raise ValueError(f"the program returned {number}, which is not finite")
    text = f"{number:.2f}"
    return "0.00" if text == "-0.00" else text

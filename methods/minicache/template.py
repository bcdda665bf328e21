"""Extraction templates T: what must be found in a request, and whether what was found may be used."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from bench.quantities import Quantity, normalise, scan

__all__ = ["Refused", "Span", "Template", "Values", "Variable", "spans_of"]

Values = dict[str, float | int | str]
"""Arguments of a cached program, by name."""

_MAX_TEXT = 200
_LEAD = re.compile(r"^[^\d.]+")
_TRAIL = re.compile(r"(?:\)|\s*(?:[A-Z]{2,3}|[$€£¥₹])\)?)$")
_DAYS = {"day": 1.0, "week": 7.0, "month": 365 / 12, "quarter": 365 / 4, "year": 365.0}
_TIME = re.compile(r"\b(day|week|month|quarter|year)s?\b", re.IGNORECASE)
_TIME_AFTER = re.compile(r"[ \u00a0-]?(day|week|month|quarter|year)s?\b", re.IGNORECASE)


class Refused(ValueError):
    """What was extracted may not be used; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Span:
    """A quantity in a request, as the small model may quote it.

    Attributes:
        text: As written, without a currency sign before it: a grammar that must begin with one derails the
            tokens after it.
        quantity: What it says.
        time: The unit of time that follows it (``month``, …), or None.
    """

    text: str
    quantity: Quantity
    time: str | None


def spans_of(text: str) -> list[Span]:
    """Return the quantities of a text in their order, each writing once."""
    folded = normalise(text)
    found: dict[str, Span] = {}
    for quantity in scan(folded):
        if quantity.number < 0 and _no_minus(folded, quantity.start):
            quantity = replace(quantity, exact=-quantity.exact, number=-quantity.number)
        digits = _TRAIL.sub("", _LEAD.sub("", folded[quantity.start : quantity.end].strip()))
        written = f"-{digits}" if quantity.number < 0 else digits
        after = _TIME_AFTER.match(folded, quantity.end)
        time = after[1].lower() if after else None
        if after and written in found and found[written].time != time:  # 12 years, and 12 months
            written += after[0]
        found.setdefault(written, Span(written, quantity, time))
    return list(found.values())


def _no_minus(text: str, start: int) -> bool:
    """Tell whether what looks like a negative amount is none.

    "the closing price (EUR 105)" and "the beta (b) (0.75)" only add a value in brackets, and in
    "Sales - £482,000" a dash stands between a name and its value.
    """
    before = text[:start].rsplit("\n", 1)[-1].rstrip(" \u00a0")[-1:]
    if text[start] == "(":
        return before.isalpha() or before == ")"
    return text[start : start + 2] in ("- ", "-\u00a0") and (before.isalnum() or before == ")")


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of a template.

    Attributes:
        name: The argument of the program that takes it.
        type: ``number``, ``integer`` or ``text``.
        description: What it is in the requests.
        unit: In which unit the program takes it; a unit of time is converted to.
        low, high: Range of allowed values; None is open.
        quoted: Whether the value must occur in the request.
    """

    name: str
    type: Literal["number", "integer", "text"]
    description: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    quoted: bool = True


@dataclass(frozen=True, slots=True)
class Template:
    """The variables of a group's requests, in the order in which the small model gives them (section 3.2)."""

    variables: tuple[Variable, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the variables as JSON objects."""
        return [asdict(variable) for variable in self.variables]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> Template:
        """Return what :meth:`to_json` wrote.

        Raises:
            TypeError: It is something else.
        """
        return cls(tuple(Variable(**one) for one in data))

    def instructions(self) -> str:
        """Return the part of the extraction prompt that is the same for every request of the group."""
        lines = [
            f"{v.name}: {v.description}" + (f" ({v.unit})" if v.unit and v.unit not in v.description else "")
            for v in self.variables
        ]
        return "\n".join(lines)

    @property
    def numbers(self) -> tuple[Variable, ...]:
        """The variables that take numbers."""
        return tuple(variable for variable in self.variables if variable.type != "text")

    def schema(
        self, spans: Sequence[Span], fitting: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, Any]:
        """Return the JSON schema of the small model's answer: numbers are chosen among the request's own.

        Args:
            spans: The quantities of the request.
            fitting: The spans that a variable may mean, where that is known; all of them otherwise.

        Raises:
            Refused: The request has fewer values than the template has numbers.
        """
        if len(spans) < len(self.numbers):
            raise Refused(f"{len(self.numbers)} numbers wanted, {len(spans)} in the request")
        choices = [span.text for span in spans]

        def values(variable: Variable) -> dict[str, Any]:
            if variable.type == "text":
                return {"type": "string", "maxLength": _MAX_TEXT}
            return {"enum": list((fitting or {}).get(variable.name, choices))}

        return {
            "type": "object",
            "properties": {variable.name: values(variable) for variable in self.variables},
            "required": [variable.name for variable in self.variables],
            "additionalProperties": False,
        }

    @staticmethod
    def value(variable: Variable, span: Span) -> float | int | None:
        """Return what a variable that takes a number would be if ``span`` were meant; None if it can't be."""
        try:
            return _number(variable, span)
        except Refused:
            return None

    def bind(self, answer: str, request: str, spans: Sequence[Span]) -> Values:
        """Return the program's arguments from the small model's answer.

        Raises:
            Refused: A field is missing or of a wrong type, a value does not occur in the request, is out of
                range, or one value stands for two variables.
        """
        try:
            given = json.loads(answer)
        except ValueError as error:
            raise Refused("the extraction is no JSON") from error
        if not isinstance(given, dict):
            raise Refused("the extraction is no object")
        by_text = {span.text: span for span in spans}
        taken: dict[str, str] = {}
        values: Values = {}
        for variable in self.variables:
            written = given.get(variable.name)
            if not isinstance(written, str) or not written.strip():
                raise Refused(f"{variable.name} is missing")
            if variable.type == "text":
                values[variable.name] = _text(variable, written.strip(), request)
                continue
            span = by_text.get(written) or _equal_span(written, spans)
            if span is None:
                raise Refused(f"{variable.name}: {written[:40]!r} is not in the request")
            if span.text in taken:
                raise Refused(f"{variable.name} and {taken[span.text]} are both {span.text!r}")
            taken[span.text] = variable.name
            values[variable.name] = _number(variable, span)
        return values


def _text(variable: Variable, written: str, request: str) -> str:
    if variable.quoted and " ".join(written.split()).casefold() not in " ".join(request.split()).casefold():
        raise Refused(f"{variable.name}: {written[:40]!r} is not in the request")
    return written


def _equal_span(written: str, spans: Sequence[Span]) -> Span | None:
    """Compare as numbers: "1200" is "1,200" and "1.2 thousand"."""
    found = scan(normalise(written))
    if len(found) != 1:
        return None
    equal = [span for span in spans if span.quantity.exact == found[0].exact]
    return equal[0] if len(equal) == 1 else None


def _number(variable: Variable, span: Span) -> float | int:
    exact = span.quantity.exact
    value = float(exact)
    unit = _TIME.search(variable.unit)
    if unit is not None and span.time is not None and unit[1].lower() != span.time:
        value = value * _ratio(span.time, unit[1].lower())
        exact = Decimal(repr(value))
    if variable.type == "integer" and exact != exact.to_integral_value():
        raise Refused(f"{variable.name}: {span.text!r} is no whole number")
    if (variable.low is not None and value < variable.low) or (
        variable.high is not None and value > variable.high
    ):
        raise Refused(f"{variable.name}: {span.text!r} is out of its range")
    return int(exact) if exact == exact.to_integral_value() and abs(exact) < 2**53 else value


def _ratio(given: str, wanted: str) -> float:
    """Return how many ``wanted`` one ``given`` is; months, quarters and years by the calendar."""
    calendar = {"month": 1.0, "quarter": 3.0, "year": 12.0}
    if given in calendar and wanted in calendar:
        return calendar[given] / calendar[wanted]
    return _DAYS[given] / _DAYS[wanted]

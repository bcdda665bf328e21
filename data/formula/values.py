"""Drawing the inputs of a built-in question, and writing them as people do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from data.formula.catalogue import FormulaSpec, Kind, Variable
from data.selection import Stream

__all__ = ["Style", "draw_inputs", "draw_style", "write_value"]

_ATTEMPTS = 500
_PERIODS = {1: "yearly", 2: "half-yearly", 4: "quarterly", 12: "monthly", 52: "weekly", 365: "daily"}
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_SCALES = (
    (10**12, "trillion", "tn"),
    (10**9, "billion", "bn"),
    (10**6, "million", "m"),
    (10**3, "thousand", "k"),
)
_CURRENCIES = ("$", "$", "$", "€", "€", "£", "¥", "₹", "USD ", "EUR ", "CHF ", "A$", " EUR", " dollars")
_SMALLEST_GOLD = 0.1
"""Below it, 2 decimals would leave less than two significant digits."""


@dataclass(frozen=True, slots=True)
class Style:
    """How one question writes its values."""

    currency: str
    amounts: str
    rates: str
    times: str


def draw_style(stream: Stream) -> Style:
    """Draw a style: the currency, and how amounts, rates and times are written."""
    return Style(
        currency=stream.pick(_CURRENCIES),
        amounts=stream.pick(("full", "full", "scaled", "scaled", "compact", "plain")),
        rates=stream.pick(("%", "%", "%", " %", " percent", " per cent", "decimal")),
        times=stream.pick(("years", "years", "months", "words")),
    )


def draw_inputs(spec: FormulaSpec, stream: Stream) -> tuple[dict[str, float], str]:
    """Draw inputs whose gold is fit to grade, and return them with the gold as text.

    A gold that lies next to a rounding tie, or that 2 decimals can hardly express, is drawn again.
    """
    for _ in range(_ATTEMPTS):
        inputs: dict[str, float] = {}
        for variable in spec.variables:
            inputs[variable.symbol] = _draw(variable, inputs, stream)
        exact = spec.solve(inputs)
        cents = abs(exact) * 100
        tie = abs(cents - math.floor(cents) - 0.5)
        if abs(exact) >= _SMALLEST_GOLD and tie > 1e-6 * max(1.0, cents * 1e-6):
            return inputs, f"{exact:.2f}"
    raise AssertionError(f"no inputs of {spec.name} give a usable gold: its ranges are wrong")


def _draw(variable: Variable, inputs: Mapping[str, float], stream: Stream) -> float:
    low, high = variable.low, variable.high
    if variable.kind is Kind.PERIODS:
        return float(stream.pick([count for count in _PERIODS if low <= count <= high]))
    if variable.share_of is not None:
        share = low + (high - low) * stream.unit()
        value = inputs[variable.share_of] * share
    elif variable.kind in (Kind.RATE, Kind.YEARS, Kind.DAYS) or high / low < 100:
        value = low + (high - low) * stream.unit()
    else:
        value = low * (high / low) ** stream.unit()
    return _tidy(value, variable, stream)


def _tidy(value: float, variable: Variable, stream: Stream) -> float:
    """Round a drawn value to something that a person would write."""
    kind = variable.kind
    if kind is Kind.RATE:
        step = stream.pick((50, 25, 10, 5))
        return max(1, round(value * 10_000 / step)) * step / 10_000
    if kind is Kind.YEARS:
        parts = 4 if variable.low < 1 and value < 3 else 2 if variable.low < 1 and stream.chance(0.3) else 1
        return max(1, round(value * parts)) / parts
    if kind is Kind.DAYS:
        usual = [days for days in (30, 31, 45, 60, 90, 91, 120, 180, 360, 365) if days <= variable.high]
        return float(stream.pick(usual) if stream.chance(0.5) else max(1, round(value)))
    if kind is Kind.PRICE:
        return max(0.01, round(value, stream.pick((0, 1, 2, 2)) if value >= 10 else 2))
    digits = stream.pick((2, 3, 3, 4))
    if kind is Kind.COUNT and value < 100:
        return float(round(value))
    rounded = _significant(value, digits + 1 if kind is Kind.NUMBER and value >= 100 else digits)
    return rounded if kind is Kind.NUMBER else max(1.0, float(round(rounded)))


def _significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")


def write_value(value: float, variable: Variable, style: Style) -> str:
    """Write a value in a question's style."""
    kind = variable.kind
    if kind is Kind.MONEY:
        return _money(value, style)
    if kind is Kind.PRICE:
        return _with_currency(_group(value, 0 if value == round(value) else 2), style.currency)
    if kind is Kind.RATE:
        return _plain(value) if style.rates == "decimal" else _plain(value, 100) + style.rates
    if kind is Kind.YEARS:
        return _years(value, style)
    if kind is Kind.DAYS:
        return f"{value:.0f} days"
    if kind is Kind.PERIODS:
        return _PERIODS[round(value)] if style.times != "months" else f"{value:.0f} times a year"
    if kind is Kind.COUNT:
        return _scaled(value, short=False) if style.amounts == "scaled" else _group(value, 0)
    return _plain(value)


def _money(value: float, style: Style) -> str:
    currency = style.currency
    if style.amounts == "compact" and not currency.startswith(" "):
        return currency + _scaled(value, short=True)
    if style.amounts in ("scaled", "compact") or value >= 10**11:
        return _with_currency(_scaled(value, short=False), currency)
    if style.amounts == "plain" and value < 10**6:
        return _with_currency(f"{value:.0f}", currency)
    return _with_currency(_group(value, 0), currency)


def _with_currency(amount: str, currency: str) -> str:
    return amount + currency if currency.startswith(" ") else currency + amount


def _scaled(value: float, *, short: bool) -> str:
    """Write with the largest scale word that leaves 3 decimals at most; thousands only in short form."""
    for factor, word, letters in _SCALES:
        if value >= factor and (short or factor > 1000) and (Decimal(value) * 1000 / factor) % 1 == 0:
            return _plain(value / factor) + (letters if short else f" {word}")
    return _group(value, 0)


def _years(value: float, style: Style) -> str:
    months = round(value * 12)
    if value < 1 or (style.times == "months" and months <= 60):
        return f"{months} months"
    if style.times == "words" and value == round(value) and value <= len(_WORDS):
        return f"{_WORDS[round(value) - 1]} year{'' if value == 1 else 's'}"
    return f"{_plain(value)} year{'' if value == 1 else 's'}"


def _group(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}"


def _plain(value: float, factor: int = 1) -> str:
    """Write a float's shortest decimal form, times a factor, without an exponent or trailing zeros."""
    text = f"{Decimal(repr(value)) * factor:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

"""The built-in formulas: what each is called, what goes into it, and the function that gives its gold.

The words and the ranges are in ``catalogue_*.toml``; the functions are in :mod:`data.formula.solvers`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files

from data.formula.solvers import SOLVERS, Values

__all__ = ["FormulaSpec", "Kind", "Variable", "catalogue"]

_FILES = ("money", "company", "markets", "economy")


class Kind(Enum):
    """How a variable's values are drawn and written."""

    MONEY = "money"
    """A large amount; written in full or with a scale word."""
    PRICE = "price"
    """An amount per share or unit, with cents."""
    RATE = "rate"
    """A fraction in the formula; written as a percentage or a decimal."""
    YEARS = "years"
    """A time in years; also written in months."""
    DAYS = "days"
    """A whole number of days."""
    COUNT = "count"
    """A whole number of things."""
    NUMBER = "number"
    """A plain number with 4 significant digits at most."""
    PERIODS = "periods"
    """Compounding periods a year; written as a word or a count."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One input of a formula.

    Attributes:
        symbol: Its name in the formula.
        meaning: What the request says that it stands for.
        kind: How values are drawn and written.
        low: Smallest value, or smallest share of ``share_of``.
        high: Largest value, or largest share of ``share_of``.
        nouns: Noun phrases that questions use for it; a leading ``+`` marks a plural.
        share_of: Symbol of an earlier variable that this one is drawn as a share of.
    """

    symbol: str
    meaning: str
    kind: Kind
    low: float
    high: float
    nouns: tuple[str, ...]
    share_of: str | None = None


@dataclass(frozen=True, slots=True)
class FormulaSpec:
    """One formula.

    Attributes:
        name: The group of its samples.
        expression: The formula as the request prints it.
        scene: What its questions are about; chooses names, openings and side facts in ``phrases.toml``.
        targets: Noun phrases for what is asked.
        variables: Its inputs.
        solve: The gold before rounding, from the inputs in the formula's units.
        percent: The formula multiplies by 100, so that its gold is in percent units.
    """

    name: str
    expression: str
    scene: str
    targets: tuple[str, ...]
    variables: tuple[Variable, ...]
    solve: Callable[[Values], float]
    percent: bool


@cache
def catalogue() -> tuple[FormulaSpec, ...]:
    """Return every built-in formula, in a fixed order."""
    folder = files("data.formula")
    specs = []
    for name in _FILES:
        text = folder.joinpath(f"catalogue_{name}.toml").read_text(encoding="utf-8")
        for entry in tomllib.loads(text)["formula"]:
            variables = tuple(
                Variable(**{**item, "kind": Kind(item["kind"]), "nouns": tuple(item["nouns"])})
                for item in entry["variables"]
            )
            specs.append(
                FormulaSpec(
                    name=entry["name"],
                    expression=entry["expression"],
                    scene=entry["scene"],
                    targets=tuple(entry["targets"]),
                    variables=variables,
                    solve=SOLVERS[entry["name"]],
                    percent=entry.get("percent", "× 100" in entry["expression"]),
                )
            )
    return tuple(specs)

"""Wording of the built-in questions: facts in many orders and layouts, with side facts among them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from data.formula.catalogue import FormulaSpec, Kind, Variable
from data.formula.values import Style, draw_style, write_value
from data.selection import Stream

__all__ = ["LAYOUTS", "Question", "write_question"]

_ASIDE_SHARE = 0.35
_SYMBOL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Question:
    """A worded question.

    Attributes:
        text: What stands between the quotes of the request.
        layout: Name of its layout.
        written: Each input as the text writes it, by symbol, in the order of the text.
    """

    text: str
    layout: str
    written: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Fact:
    noun: str
    value: str
    plural: bool
    kind: Kind
    symbol: str | None

    @property
    def named(self) -> str:
        return f"{self.noun} ({self.symbol})" if self.symbol else self.noun

    def phrase(self, stream: Stream) -> str:
        """Return it as a noun phrase: "a rate of 8%"."""
        if self.kind is Kind.PERIODS:
            return stream.pick((f"{self.noun} {self.value}", f"{self.value} {self.noun}"))
        if self.kind is Kind.COUNT and self.plural:
            return f"{self.value} {self.named}"
        forms = [
            "{n} of {v}",
            "the {n} at {v}",
            "{v} as the {n}",
            "{n} {v}",
            "{v} for the {n}",
            "{n} equal to {v}",
        ]
        if self.plural:
            forms.append("{n} worth {v}" if self.kind is Kind.MONEY else "{n} of {v}")
        elif self.kind in (Kind.RATE, Kind.YEARS, Kind.DAYS, Kind.NUMBER) and not self.noun[:2].isupper():
            forms += ["a {n} of {v}"] * 3 if self.noun[0] not in "aeiou" else ["an {n} of {v}"] * 3
        return stream.pick(forms).format(n=self.named, v=self.value)

    def clause(self, stream: Stream) -> str:
        """Return it as a clause: "the rate is 8%"."""
        if self.kind is Kind.COUNT and self.plural:
            return stream.pick(
                (f"there are {self.value} {self.named}", f"the {self.named} number {self.value}")
            )
        verbs = (
            ("are", "come to", "stand at", "total")
            if self.plural
            else ("is", "comes to", "stands at", "equals")
        )
        if self.kind not in (Kind.PERIODS, Kind.YEARS) and stream.chance(0.25):
            return f"{self.value} {'are' if self.plural else 'is'} the {self.named}"
        return (
            f"the {self.named} {stream.pick(verbs) if self.kind is not Kind.PERIODS else 'is'} {self.value}"
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a layout puts together."""

    facts: Sequence[_Fact]
    target: str
    ask: str
    opening: str
    name: str
    stream: Stream

    def phrases(self) -> str:
        return _listed([fact.phrase(self.stream) for fact in self.facts])

    def clauses(self) -> str:
        return _listed([fact.clause(self.stream) for fact in self.facts])


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lower_ask(parts: _Parts) -> str:
    return parts.ask[:1].lower() + parts.ask[1:]


def _condition(parts: _Parts) -> str:
    head = parts.stream.pick(("If", "Suppose that", "Assume that", "Given that", "When"))
    joint = ". " + parts.ask if head in ("Suppose that", "Assume that") else ", " + _lower_ask(parts)
    return f"{head} {parts.clauses()}{joint}"


def _story(parts: _Parts) -> str:
    verb = parts.stream.pick(
        ("The figures are", "On record are", "We are told of", "It works with", "Known are")
    )
    return f"{parts.opening} {verb} {parts.phrases()}. {parts.ask}"


def _ask_first(parts: _Parts) -> str:
    joint = parts.stream.pick(("given", "with", "from", "on the basis of", "taking"))
    return f"{parts.ask[:-1]} for {parts.name}, {joint} {parts.phrases()}{parts.ask[-1]}"


def _sentences(parts: _Parts) -> str:
    body = " ".join(_upper(fact.clause(parts.stream)) + "." for fact in parts.facts)
    return f"{parts.opening} {body} {parts.ask}"


def _labels(parts: _Parts) -> str:
    mark = parts.stream.pick((": ", " = ", " - ", ": "))
    lines = [f"{_upper(fact.named)}{mark}{fact.value}" for fact in parts.facts]
    return "\n    ".join([*lines, parts.ask])


def _bullets(parts: _Parts) -> str:
    bullet = parts.stream.pick(("- ", "* ", "• "))
    lines = [f"{bullet}{fact.named}: {fact.value}" for fact in parts.facts]
    return "\n".join([parts.opening, *lines, parts.ask])


def _header(parts: _Parts) -> str:
    return f"**{_upper(parts.name)}**: {_upper(parts.clauses())}. {parts.ask}"


def _table(parts: _Parts) -> str:
    heads = parts.stream.pick(("| Item | Value |", "| Entry | Figure |", "| Quantity | Amount |"))
    lines = [f"| {_upper(fact.named)} | {fact.value} |" for fact in parts.facts]
    return "\n".join([parts.opening, heads, "|---|---|", *lines, parts.ask])


def _colon(parts: _Parts) -> str:
    head = parts.stream.pick(("Data", "Inputs", "Known", "Figures for {n}", "From the file on {n}")).format(
        n=parts.name
    )
    items = "; ".join(f"{fact.named} {fact.value}" for fact in parts.facts)
    return f"{head}: {items}. {parts.ask}"


def _where(parts: _Parts) -> str:
    return f"{parts.ask[:-1]}, where {parts.clauses()}{parts.ask[-1]}"


def _speech(parts: _Parts) -> str:
    told = parts.stream.pick(("explains", "notes", "writes", "says", "points out"))
    who = parts.stream.pick(("A colleague", "The tutor", "Her mentor", "The clerk", "A reader"))
    return f"{parts.opening} {who} {told} that {parts.clauses()}. {parts.ask}"


def _memo(parts: _Parts) -> str:
    lines = "\n".join(f"{number}) {fact.named}, {fact.value}" for number, fact in enumerate(parts.facts, 1))
    return f"Re: {parts.target} of {parts.name}\n{lines}\n{parts.ask}"


def _split(parts: _Parts) -> str:
    first, *rest = parts.facts
    start = f"With {first.phrase(parts.stream)}, {parts.name} is looked at."
    then = f" {_upper(_listed([fact.clause(parts.stream) for fact in rest]))}." if rest else ""
    return f"{start}{then} {parts.ask}"


def _brackets(parts: _Parts) -> str:
    items = _listed([f"{fact.named} ({fact.value})" for fact in parts.facts])
    verb = parts.stream.pick(("depends on", "is built from", "rests on", "draws on"))
    return f"The {parts.target} of {parts.name} {verb} {items}. {parts.ask}"


LAYOUTS: Mapping[str, Callable[[_Parts], str]] = {
    "condition": _condition,
    "story": _story,
    "ask_first": _ask_first,
    "sentences": _sentences,
    "labels": _labels,
    "bullets": _bullets,
    "header": _header,
    "table": _table,
    "colon": _colon,
    "where": _where,
    "speech": _speech,
    "memo": _memo,
    "split": _split,
    "brackets": _brackets,
}


@cache
def _banks() -> dict[str, Any]:
    return tomllib.loads(files("data.formula").joinpath("phrases.toml").read_text(encoding="utf-8"))


def write_question(spec: FormulaSpec, inputs: Mapping[str, float], stream: Stream) -> Question:
    """Word a question on a formula.

    Args:
        spec: The formula.
        inputs: Its inputs.
        stream: Decides on words, order, layout and style.
    """
    banks = _banks()
    scene = banks[spec.scene]
    layout = stream.pick(tuple(LAYOUTS))
    style = draw_style(stream)
    with_symbols = stream.chance(_SYMBOL_SHARE)
    order = stream.shuffled(spec.variables)
    facts = [_fact(variable, inputs, style, with_symbols, stream) for variable in order]
    words = _words(banks, stream)
    name = stream.pick(scene["names"]).format(**words)
    opening = _upper(stream.pick(scene["openings"]).format(n=name, **words))
    if stream.chance(_ASIDE_SHARE):
        aside = _upper(stream.pick(scene["asides"]).format(**words))
        opening = f"{opening} {aside}" if stream.chance(0.7) else f"{aside} {opening}"
    target = stream.pick(spec.targets).removeprefix("+")
    ask = stream.pick(banks["asks"]).format(t=target)
    text = LAYOUTS[layout](_Parts(facts, target, ask, opening, name, stream))
    return Question(text, layout, {v.symbol: fact.value for v, fact in zip(order, facts, strict=True)})


def _fact(
    variable: Variable, inputs: Mapping[str, float], style: Style, with_symbol: bool, stream: Stream
) -> _Fact:
    noun = stream.pick(variable.nouns)
    return _Fact(
        noun=noun.removeprefix("+"),
        value=write_value(inputs[variable.symbol], variable, style),
        plural=noun.startswith("+"),
        kind=variable.kind,
        symbol=variable.symbol if with_symbol else None,
    )


def _words(banks: Mapping[str, Any], stream: Stream) -> dict[str, str]:
    return {
        "w": stream.pick(banks["people"]),
        "s": stream.pick(banks["surnames"]),
        "s2": stream.pick(banks["surnames"]),
        "r": stream.pick(banks["trades"]),
        "f": stream.pick(banks["forms"]),
        "c": stream.pick(banks["cities"]),
        "l": stream.pick(banks["lands"]),
        "a": f"{20 + stream.below(900)}",
        "b": f"{2 + stream.below(38)}",
        "y": f"{1951 + stream.below(70)}",
    }

"""Which of a request's values plays which role, judged by the words around it.

A cached program's variables were each seen in a few requests. The words beside a value ("purchase cost equal
to # EUR") are near, for the encoder, to the words beside the values that the variable had there. This gives
each variable the spans that may be meant; the small model chooses among those. What a variable is called
counts as one more phrase, and a variable that was always a percentage is not an amount.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from bench.encoder import Encoder
from bench.quantities import Quantity, normalise, scan
from methods.minicache.template import Span, Variable, spans_of

if TYPE_CHECKING:
    from bench.encoder import Vector

__all__ = ["Roles", "phrases_of"]

_WORDS = 8
_BREAK = re.compile(r"[;?!|\n]|\.\s|,\s|\band\b")
_BARE = " |$€£¥₹(:.-*"
_MOST_KNOWN = 20_000
_NEVER = -1e3
"""A similarity that no assignment survives."""
_PERCENT_WEIGHT = 0.3
_AMOUNT_WEIGHT = 0.2
"""What it costs a span to be a percentage, or an amount of money, where the variable never was one, or the
other way round. A currency is easily left out; the mark of a percentage is not.
"""
_MEAN_SHARE = 0.5
"""Weight of the mean similarity to all phrases of a variable beside that to the nearest one."""


def phrases_of(text: str) -> dict[int, str]:
    """Return the words around each quantity of a text, by the quantity's offset in the folded text.

    The clause up to the quantity and the rest of its own clause, the quantity itself as ``#``.
    """
    folded = normalise(text)
    quantities = scan(folded)
    found = {}
    for at, quantity in enumerate(quantities):
        low = quantities[at - 1].end if at else 0
        high = quantities[at + 1].start if at + 1 < len(quantities) else len(folded)
        before = _BREAK.split(folded[low : quantity.start])
        left = before[-1]
        if not left.strip(_BARE) and len(before) > 1:  # a table's cell, or a list's "name, value"
            left = before[-2]
        right = _BREAK.split(folded[quantity.end : high])[0]
        found[quantity.start] = f"{_last(left)} # {_first(right)}".strip()
    return found


def _last(text: str) -> str:
    return " ".join(text.split()[-_WORDS:])


def _first(text: str) -> str:
    return " ".join(text.split()[:_WORDS])


class Roles:
    """Compares the phrases of requests with those of an entry's variables; keeps what it has embedded.

    Args:
        encoder: Embeds phrases.
        margin: How much worse than the best assignment of spans to variables another must be, in summed
            similarity, to be ruled out.
    """

    def __init__(self, encoder: Encoder, margin: float) -> None:
        self._encoder = encoder
        self._margin = margin
        self._known: dict[str, Vector] = {}

    def forget(self) -> None:
        """Drop what was embedded for entries."""
        self._known.clear()

    async def assignment(
        self, variables: Sequence[Variable], shots: Sequence[tuple[str, Mapping[str, str]]], request: str
    ) -> dict[str, list[str]] | None:
        """Return the spans, as written, that may be meant by each variable, the best one first.

        A span may be meant where the best assignment that gives it to the variable is near the best of all.

        Args:
            variables: Those that take numbers.
            shots: Requests with the spans that the variables took there.
            request: The request to read.

        Returns:
            None where nothing can be said: no shots, or fewer spans than variables.

        Raises:
            ModelMissing: The encoder's files are absent.
        """
        around = phrases_of(request)
        spans = spans_of(request)
        if len(spans) < len(variables):
            return None
        seen = [_beside(shots, variable.name) for variable in variables]
        if not all(seen):
            return None
        vectors = await self._vectors([around.get(span.quantity.start, "#") for span in spans])
        scores = np.empty((len(variables), len(spans)))
        for row, (variable, beside) in enumerate(zip(variables, seen, strict=True)):
            own = await self._vectors([f"{variable.description} #", *(text for text, _ in beside)])
            usual = np.mean([_kind(quantity) for _, quantity in beside], axis=0)
            for column, (span, vector) in enumerate(zip(spans, vectors, strict=True)):
                off = float(np.abs(_kind(span.quantity) - usual).sum())
                scores[row, column] = _similarity(own, vector) - off
        near = _near_best(scores, self._margin)
        return {
            variable.name: [spans[column].text for column in columns]
            for variable, columns in zip(variables, near, strict=True)
        }

    async def _vectors(self, texts: Sequence[str]) -> list[Vector]:
        known = {text: self._known[text] for text in texts if text in self._known}
        fresh = [text for text in dict.fromkeys(texts) if text not in known]
        if fresh:
            embedded = await self._encoder.embed(fresh)
            known |= {text: one.vector for text, one in zip(fresh, embedded, strict=True)}
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known |= known
        return [known[text] for text in texts]


def _beside(shots: Sequence[tuple[str, Mapping[str, str]]], name: str) -> list[tuple[str, Quantity]]:
    """Return the words around what a variable took in each request, and what that was."""
    found = []
    for request, values in shots:
        around, spans = _read(request)
        own = [span for span in spans if span.text == values.get(name)]
        found += [(around.get(span.quantity.start, "#"), span.quantity) for span in own]
    return found


@lru_cache(maxsize=_MOST_KNOWN)  # an entry's few requests are asked about at each of its hits
def _read(request: str) -> tuple[dict[int, str], list[Span]]:
    return phrases_of(request), spans_of(request)


def _kind(quantity: Quantity) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    amount = quantity.currency or quantity.scale != 1
    return np.array([_PERCENT_WEIGHT * quantity.percent, _AMOUNT_WEIGHT * amount])


def _similarity(own: Sequence[Vector], vector: Vector) -> float:
    cosines = [float(one @ vector) for one in own]
    mean = sum(cosines) / len(cosines)
    return (max(cosines) + _MEAN_SHARE * mean) / (1 + _MEAN_SHARE)


def _near_best(scores: np.ndarray[tuple[int, int], np.dtype[np.float64]], margin: float) -> list[list[int]]:
    """Return the columns that each row may have: that of the best assignment, then by what the best one with
    another column loses, where that is less than ``margin``.
    """
    best = _best(scores)
    total = _sum(scores, best)

    def loss(row: int, column: int) -> float:
        forced = scores.copy()
        forced[row] = _NEVER
        forced[row, column] = scores[row, column]
        return total - _sum(forced, _best(forced))

    near = []
    for row, own in enumerate(best):
        losses = {column: loss(row, column) for column in range(scores.shape[1]) if column != own}
        others = sorted((column for column in losses if losses[column] < margin), key=losses.__getitem__)
        near.append([own, *others])
    return near


def _best(scores: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[int]:
    """Return the column of each row in the assignment of distinct columns with the highest sum."""
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(-scores)
    return [int(column) for column in columns]


def _sum(scores: np.ndarray[tuple[int, int], np.dtype[np.float64]], columns: Sequence[int]) -> float:
    return float(scores[range(len(columns)), columns].sum())

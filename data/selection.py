"""Seeded choices that give the same result on every platform and Python version."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from bench.errors import UsageError, did_you_mean
from bench.workload import Selection

__all__ = ["Stream", "check_options", "choose", "choose_groups"]

T = TypeVar("T")


class Stream:
    """A stream of seeded choices, drawn from ``random.Random.random`` alone.

    That method's sequence for a seed is fixed by Python's documentation; those of ``choice`` or ``shuffle``
    are not. The key is hashed here, so that negative and textual seeds are distinct, too.
    """

    def __init__(self, *key: object) -> None:
        digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
        self._random = random.Random(int.from_bytes(digest))

    def unit(self) -> float:
        """Return a float in [0, 1)."""
        return self._random.random()

    def below(self, limit: int) -> int:
        """Return an int in [0, limit)."""
        return int(self._random.random() * limit)

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self._random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[self.below(len(options))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in random order."""
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self.below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed


def check_options(selection: Selection, known: Sequence[str], title: str) -> None:
    """Refuse sizes below one and options that a workload does not know.

    Raises:
        UsageError: With what is wrong and what would be right.
    """
    for name, value in (("n", selection.n), ("groups", selection.groups)):
        if value is not None and value < 1:
            raise UsageError(f"{title}: {name} = {value} asks for nothing; it must be at least 1.")
    for option in selection.options:
        if option not in known:
            raise UsageError(f'{title} has no option "{option}".{did_you_mean(option, known)}')


def choose_groups(names: Sequence[str], selection: Selection, title: str) -> list[str]:
    """Return ``selection.groups`` of the group names, seeded; all of them where it is None.

    Raises:
        UsageError: There are fewer groups.
    """
    if selection.groups is None:
        return list(names)
    if selection.groups > len(names):
        raise UsageError(f"{title} has {len(names)} groups; {selection.groups} were asked for.")
    drawn = set(Stream("groups", selection.seed).shuffled(names)[: selection.groups])
    return [name for name in names if name in drawn]


def choose(groups: Mapping[str, Sequence[T]], selection: Selection, title: str) -> list[T]:
    """Draw groups, then ``selection.n`` items spread evenly over them, in seeded random order.

    Each group gives one item in turn until ``n`` are drawn; a group that runs out is passed over.

    Raises:
        UsageError: There are fewer groups or items than asked for.
    """
    names = choose_groups(list(groups), selection, title)
    available = sum(len(groups[name]) for name in names)
    wanted = available if selection.n is None else selection.n
    if wanted > available:
        raise UsageError(f"{title} has {available} samples in {len(names)} groups; {wanted} were asked for.")
    piles = [Stream("items", selection.seed, name).shuffled(groups[name]) for name in names]
    turns = Stream("turns", selection.seed).shuffled(piles)
    drawn: list[T] = []
    depth = 0
    while len(drawn) < wanted:
        drawn.extend(pile[depth] for pile in turns if depth < len(pile))
        depth += 1
    return Stream("order", selection.seed).shuffled(drawn[:wanted])

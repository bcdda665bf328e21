"""The state of MiniCache: groups of requests, their exemplars and their entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from bench.method import StateEvent
from methods.minicache.generation import Entry, Exemplar
from methods.routing import CentroidIndex, pack_vector, unpack_vector

if TYPE_CHECKING:
    from bench.encoder import Vector

__all__ = ["Group", "Groups"]


@dataclass(slots=True)
class Group:
    """Requests that ask for one computation.

    Attributes:
        id: Number, from 0; also its row in the index.
        nu: How many exemplars trigger the next generation (ν).
        scope: What keeps groups apart however near they are.
        key: The template's name, where groups are made by it.
        seen: Exemplars ever added.
        exemplars: Clean misses, oldest first.
        entry: The cached program, or None.
        uncacheable: Whether no more generations are tried.
        triggers: Generations that failed, or ended in a split; a group that leaves another inherits them.
        attempted, accepted: Entries that the target (or anti-unification) made, and those that passed.
        hits, refused: Requests that the entry answered, and those whose extraction was refused.
        refused_in_a_row: Refusals since the last hit.
        entries: Entries made so far, for the next one's id.
        summaries: Why generations failed, oldest first.
    """

    id: int
    nu: float
    scope: str = ""
    key: str | None = None
    seen: int = 0
    exemplars: list[Exemplar] = field(default_factory=list)
    entry: Entry | None = None
    uncacheable: bool = False
    triggers: int = 0
    attempted: int = 0
    accepted: int = 0
    hits: int = 0
    refused: int = 0
    refused_in_a_row: int = 0
    entries: int = 0
    summaries: list[str] = field(default_factory=list)

    @property
    def state(self) -> Literal["open", "cached", "uncacheable"]:
        """What requests of the group can expect."""
        return "cached" if self.entry else "uncacheable" if self.uncacheable else "open"


class Groups:
    """All groups: the fold of the events that :meth:`apply` takes.

    Args:
        dimensions: Length of an embedding.
        nu: ν of a new group.
        beta: What ν grows by after a failed generation.
        most_triggers: Failed generations after which a group is uncacheable (K).
        most_exemplars: Exemplars that a group keeps; the oldest go.
    """

    def __init__(
        self, dimensions: int, *, nu: int, beta: float, most_triggers: int, most_exemplars: int
    ) -> None:
        self._dimensions = dimensions
        self._nu = nu
        self._beta = beta
        self._most_triggers = most_triggers
        self._most_exemplars = most_exemplars
        self.reset()

    def reset(self) -> None:
        """Forget every group."""
        self.index = CentroidIndex(self._dimensions)
        self.all: list[Group] = []
        self.by_key: dict[str, int] = {}
        self._scopes: set[str] = set()

    def apply(self, event: StateEvent) -> None:
        """Apply one change.

        Raises:
            ValueError, KeyError, TypeError: It is not one of ours.
        """
        operations = {
            "exemplar": self._exemplar,
            "hit": self._hit,
            "refused": self._refused,
            "install": self._install,
            "learn": self._learn,
            "failed": self._failed,
            "evict": self._evict,
            "split": self._split,
            "restore": self._restore,
        }
        operation = operations.get(event["op"])
        if operation is None:
            raise ValueError(f"no such change: {event['op']!r}")
        operation(event)

    def nearest(self, vector: Vector, scope: str) -> tuple[int, float] | None:
        """Return the group of ``scope`` with the highest cosine, and that cosine; None without a group."""
        if self._scopes == {scope}:
            return self.index.nearest(vector)
        return self.index.nearest(vector, [group.id for group in self.all if group.scope == scope])

    def _of(self, event: StateEvent) -> Group:
        number = event["group"]
        if not 0 <= number < len(self.all):
            raise ValueError(f"no group {number}")
        return self.all[number]

    def _new(self, vector: str, scope: str, key: str | None) -> Group:
        group = Group(self.index.add(unpack_vector(vector)), self._nu, scope, key)
        self.all.append(group)
        self._scopes.add(scope)
        if key is not None:
            self.by_key[key] = group.id
        return group

    def _exemplar(self, event: StateEvent) -> None:
        exemplar = Exemplar(**event["exemplar"])
        if event["group"] is None:
            group = self._new(exemplar.vector, event["scope"], event["key"])
        else:
            group = self._of(event)
            self.index.update(group.id, unpack_vector(exemplar.vector))
        group.exemplars.append(exemplar)
        group.seen += 1
        del group.exemplars[: -self._most_exemplars]

    def _hit(self, event: StateEvent) -> None:
        group = self._of(event)
        self.index.update(group.id, unpack_vector(event["vector"]))
        group.hits += 1
        group.refused_in_a_row = 0

    def _refused(self, event: StateEvent) -> None:
        group = self._of(event)
        group.refused += 1
        group.refused_in_a_row += 1

    def _count(self, event: StateEvent) -> Group:
        group = self._of(event)
        group.attempted += event["attempted"]
        group.accepted += event["accepted"]
        group.summaries += event["summaries"]
        return group

    def _install(self, event: StateEvent) -> None:
        group = self._count(event)
        group.entry = Entry.from_json(event["entry"])
        group.entries += 1
        group.refused_in_a_row = 0

    def _learn(self, event: StateEvent) -> None:
        group = self._of(event)
        if group.entry is not None:
            request, values = event["shot"]
            group.entry = replace(group.entry, shots=(*group.entry.shots, (request, dict(values))))

    def _failed(self, event: StateEvent) -> None:
        group = self._count(event)
        group.triggers += 1
        group.nu *= self._beta
        group.uncacheable = group.triggers >= self._most_triggers

    def _evict(self, event: StateEvent) -> None:
        group = self._of(event)
        group.entry = None
        group.summaries.append(event["reason"])

    def _split(self, event: StateEvent) -> None:
        group = self._count(event)
        moved = set(event["moved"])
        leaving = [one for at, one in enumerate(group.exemplars) if at in moved]
        group.exemplars = [one for at, one in enumerate(group.exemplars) if at not in moved]
        group.seen = len(group.exemplars)
        group.triggers += 1
        fresh = self._new(leaving[0].vector, group.scope, None)
        fresh.triggers = group.triggers
        for exemplar in leaving[1:]:
            self.index.update(fresh.id, unpack_vector(exemplar.vector))
        fresh.exemplars = leaving
        fresh.seen = len(leaving)

    def _restore(self, event: StateEvent) -> None:
        data = dict(event["state"])
        data["exemplars"] = [Exemplar(**one) for one in data["exemplars"]]
        data["entry"] = Entry.from_json(data["entry"]) if data["entry"] else None
        row = self.index.restore(unpack_vector(event["total"]), event["count"])
        group = Group(id=row, **data)
        self.all.append(group)
        self._scopes.add(group.scope)
        if group.key is not None:
            self.by_key[group.key] = group.id

    def snapshot(self) -> Iterator[StateEvent]:
        """Yield one event per group that brings it back as it is."""
        for group in self.all:
            state = {name: getattr(group, name) for name in Group.__dataclass_fields__ if name != "id"}
            state["exemplars"] = [asdict(one) for one in group.exemplars]
            state["entry"] = group.entry.to_json() if group.entry else None
            state["summaries"] = list(group.summaries)
            yield {
                "op": "restore",
                "total": pack_vector(self.index.total(group.id)),
                "count": self.index.count(group.id),
                "state": state,
            }

    def describe(self) -> list[Mapping[str, Any]]:
        """Return every group for a person to read, without embeddings."""
        return [
            {
                "group": group.id,
                "key": group.key,
                "state": group.state,
                "requests": self.index.count(group.id),
                "exemplars": [one.request for one in group.exemplars],
                "trigger": group.nu,
                "failed_triggers": group.triggers,
                "entries_attempted": group.attempted,
                "entries_accepted": group.accepted,
                "hits": group.hits,
                "refused": group.refused,
                "summaries": list(group.summaries),
                "entry": group.entry.to_json() if group.entry else None,
            }
            for group in self.all
        ]

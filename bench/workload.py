"""Workloads: named, versioned sets of samples with their grading, and the gold-free task behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from bench.samples import Message, Sample, last_user_text

__all__ = ["DatasetFacts", "GenericTask", "Grade", "Selection", "Task", "Workload"]


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one reply.

    Attributes:
        scores: Every score that the workload records, each in [0, 1], by name (for example
            ``strict`` and ``rounded``). ``scores[workload.primary_score]`` is what accuracy means.
        extracted: The answer read out of the reply, JSON-serialisable; None where none was found.
        parsed: False where the reply held no answer in the asked format (outcome ``unparsed``).
        explanation: One line for a person who wonders about the verdict.
    """

    scores: Mapping[str, float]
    extracted: Any
    parsed: bool
    explanation: str


class Task(Protocol):
    """What a method may know about the workload that it serves. Holds no gold and no sample."""

    @property
    def name(self) -> str:
        """The workload's name."""
        ...

    @property
    def miss_path(self) -> Literal["pot", "direct"]:
        """What a cache does on a miss: ``pot`` where a program is natural, ``direct`` elsewhere."""
        ...

    @property
    def max_tokens(self) -> int:
        """Cap on the target's answer, in tokens."""
        ...

    @property
    def similarity_threshold(self) -> float:
        """Cosine of :meth:`views` from which two requests belong to one group (τ), where a method's
        settings name none.
        """
        ...

    def instruction(self, messages: Sequence[Message]) -> str:
        """Return the part of the request that varies between requests (never shared boilerplate)."""
        ...

    def views(self, messages: Sequence[Message]) -> Sequence[tuple[str, float]]:
        """Return what of the request says which computation it asks for: texts with their weights.

        Requests are routed by the weighted mean of the texts' embeddings.
        """
        ...

    def template_key(self, messages: Sequence[Message]) -> str | None:
        """Return the name of the request's template as the request itself gives it; None without one.

        For the upper bound that groups by it instead of by embedding.
        """
        ...

    def format_value(self, value: object) -> str:
        """Render a program's value in the answer format that the request asks for.

        Raises:
            ValueError: The value can't be an answer of this task (for example None, or not finite).
        """
        ...

    def same_answer(self, a: str, b: str) -> bool:
        """Tell whether two replies give the same answer under the workload's tolerance."""
        ...


@dataclass(frozen=True, slots=True)
class GenericTask:
    """The task of a deployed service that serves no known workload: replies are plain text."""

    name: str = "generic"
    miss_path: Literal["pot", "direct"] = "direct"
    max_tokens: int = 512
    similarity_threshold: float = 0.8

    def instruction(self, messages: Sequence[Message]) -> str:
        """Return the last user message."""
        return last_user_text(messages)

    def views(self, messages: Sequence[Message]) -> Sequence[tuple[str, float]]:
        """Return the last user message alone."""
        return [(last_user_text(messages), 1.0)]

    def template_key(self, messages: Sequence[Message]) -> str | None:
        """Return None: nothing is known of templates here."""
        return None

    def format_value(self, value: object) -> str:
        """Return ``str(value)``; None is refused."""
        if value is None:
            raise ValueError("the program returned no value")
        return str(value)

    def same_answer(self, a: str, b: str) -> bool:
        """Compare with white space folded."""
        return " ".join(a.split()) == " ".join(b.split())


@dataclass(frozen=True, slots=True)
class Selection:
    """Which samples of a workload to load.

    Attributes:
        source: ``builtin`` | ``path`` | ``hub``.
        path: A file, for ``path``.
        split: ``test`` or ``train``, for sources that have splits.
        n: How many samples; None means all (``builtin``: the workload's default size).
        groups: How many groups to draw them from; None means all.
        seed: Seeds generation and selection.
        options: Workload-specific settings.
    """

    source: Literal["builtin", "path", "hub"] = "builtin"
    path: str | None = None
    split: str = "test"
    n: int | None = None
    groups: int | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What was loaded, for ``run.json``.

    Attributes:
        source: As in :class:`Selection`.
        origin: File name, URL, or generator version.
        sha256: Hash of the file, or of the generated samples.
        rows: Rows in the source before selection.
        duplicates: Rows whose normalised request already occurred.
        notes: Anything that a reader should know (rows dropped and why, known wrong golds, …).
    """

    source: str
    origin: str
    sha256: str
    rows: int
    duplicates: int = 0
    notes: tuple[str, ...] = ()


@runtime_checkable
class Workload(Protocol):
    """A named, versioned set of samples and how a reply to them is graded."""

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def version(self) -> str:
        """Raised whenever the samples, the generator or the grading change; results of different
        versions are never compared.
        """
        ...

    @property
    def primary_score(self) -> str:
        """Key of :attr:`Grade.scores` that tables call accuracy."""
        ...

    @property
    def task(self) -> Task:
        """The gold-free side, which methods may see."""
        ...

    def load(self, selection: Selection) -> tuple[list[Sample], DatasetFacts]:
        """Return the selected samples in their order, and facts about the source.

        Raises:
            UsageError: The selection makes no sense (unknown split, n < 1, …).
            DataMissing: The source is absent, empty, of a wrong schema or of a wrong hash.
        """
        ...

    def grade(self, sample: Sample, reply: str) -> Grade:
        """Grade one reply. Pure: the same input gives the same grade."""
        ...

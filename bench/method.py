"""Methods: the thing under test. One chat request in, one :class:`Reply` out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from bench.encoder import Encoder
from bench.engine import Completion, Emit, EngineCall, EngineClient
from bench.execution import ProgramExecutor
from bench.samples import Message
from bench.workload import Task

__all__ = [
    "Background",
    "CacheEvent",
    "CacheKind",
    "ChatRequest",
    "Context",
    "Describable",
    "Environment",
    "Method",
    "Reply",
    "Stage",
    "Stateful",
    "StateEvent",
    "Trace",
    "union_ns",
]

CacheKind = Literal["none", "miss", "exact", "semantic", "program", "kv"]
"""``none``: the method has no cache. Everything after ``miss`` is a hit of that kind."""

StateEvent = Mapping[str, Any]
"""One change of a method's state, JSON-serialisable; the state is the fold of its events."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat-completions request as a method sees it.

    Attributes:
        model: The model name that the client asked for.
        messages: Chat messages in the OpenAI shape.
        params: Every other field of the body that can change the output (temperature, stop, tools, …);
            not ``stream`` or ``stream_options``, which only change the transport.
    """

    model: str
    messages: tuple[Message, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """What the cache did for one request.

    Attributes:
        kind: See :data:`CacheKind`.
        key: The key or entry concerned (a digest or an entry id), where there is one.
        similarity: Cosine similarity of a semantic lookup, in [-1, 1].
        reason: Why, in a few words (``"no entry"``, ``"extraction failed: missing rate"``, …).
        saved_tokens: Completion tokens of the target that the hit did not need to generate, if known.
    """

    kind: CacheKind
    key: str | None = None
    similarity: float | None = None
    reason: str | None = None
    saved_tokens: int | None = None

    @property
    def hit(self) -> bool:
        """Whether the reply came from the cache."""
        return self.kind not in ("none", "miss")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reply:
    """A method's answer to one request.

    Attributes:
        text: The answer.
        cache: What the cache did.
        finish_reason: As in the OpenAI API.
        tool_calls: In the OpenAI shape.
        details: Method-specific facts for the record (program, its status, fallback, …), JSON-serialisable.
    """

    text: str
    cache: CacheEvent
    finish_reason: str = "stop"
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, completion: Completion, cache: CacheEvent, **details: Any) -> Reply:
        """Pass a completion on as the reply."""
        if completion.from_reasoning:
            details["from_reasoning"] = True
        return cls(completion.text, cache, completion.finish_reason, completion.tool_calls, details)


@dataclass(slots=True)
class Stage:
    """A named part of a request's handling, in monotonic nanoseconds."""

    name: str
    started_ns: int
    finished_ns: int | None = None


@dataclass(slots=True)
class Trace:
    """Everything that is measured about one request inside the service."""

    received_ns: int
    stages: list[Stage] = field(default_factory=list)
    calls: list[EngineCall] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the enclosed block under ``name``."""
        stage = Stage(name, time.monotonic_ns())
        self.stages.append(stage)
        try:
            yield
        finally:
            stage.finished_ns = time.monotonic_ns()


class Context(Protocol):
    """What a method is handed with one request, or with one piece of background work."""

    trace: Trace
    emit: Emit
    """Streams answer text to the client as it arrives. Whatever was emitted must be a prefix of
    :attr:`Reply.text`; the service sends the rest."""

    @property
    def target(self) -> EngineClient:
        """The target engine."""
        ...

    @property
    def small(self) -> EngineClient:
        """The small engine. Raises UsageError where the pair has none."""
        ...

    def commit(self, event: StateEvent) -> None:
        """Make one state change durable and apply it.

        The event is written to the journal under this request's id before the method's
        :meth:`Stateful.apply` sees it, so that a killed run resumes with the state that its
        finished requests left, and no other.
        """
        ...

    def background(self, name: str, work: Background) -> None:
        """Start work that no request waits for.

        It gets a context of its own, with its own trace, whose changes are committed under this request's
        id. What it did is recorded beside the requests, its engine calls included: they are part of the
        method's cost. An exception ends it and is recorded. It is cancelled where the state is reset.

        Args:
            name: What kind of work, for the record.
            work: Takes the context, returns facts for the record, JSON-serialisable.
        """
        ...


Background = Callable[[Context], Awaitable[Mapping[str, Any]]]
"""See :meth:`Context.background`."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a method is built with; lives as long as the service.

    Attributes:
        task: The gold-free side of the workload.
        executor: Isolated program execution.
        encoder: Sentence embeddings. A method that uses them says so by ``needs_encoder = True``.
    """

    task: Task
    executor: ProgramExecutor
    encoder: Encoder


class Method(Protocol):
    """The thing under test.

    A method is a class with a ``Config`` (a frozen pydantic model with defaults), built as
    ``cls(config, environment)``, and a static ``roles(config)`` that names the engines it calls.
    It reaches models only through the context's clients. ``needs_encoder = True`` on the class says that
    it embeds text; the service then loads the encoder before the first request.
    """

    async def reply(self, request: ChatRequest, context: Context) -> Reply:
        """Answer one request.

        Raises:
            EngineError: Infrastructure failed; the service answers 502 and nothing is cached.
            UsageError: The request is at fault; the service answers 400.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """A method that remembers. Its state is the fold of :meth:`apply` over its events."""

    def apply(self, event: StateEvent) -> None:
        """Apply one state change. Deterministic; the only place where state changes."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...

    def snapshot(self) -> Iterable[StateEvent]:
        """Return events that rebuild the present state from empty."""
        ...

    def stats(self) -> Mapping[str, int | float | str]:
        """Return counters and sizes for ``/admin/stats``."""
        ...


@runtime_checkable
class Describable(Protocol):
    """A method whose state is worth a look by a person."""

    def describe(self) -> Mapping[str, Any]:
        """Return the state for ``GET /admin/cache``: groups and entries, without embeddings."""
        ...


def union_ns(intervals: Sequence[tuple[int, int]]) -> int:
    """Return the length of the union of half-open intervals, in their unit."""
    total = 0
    end: int | None = None
    for start, stop in sorted(intervals):
        if end is None or start > end:
            total += stop - start
            end = stop
        elif stop > end:
            total += stop - end
            end = stop
    return total

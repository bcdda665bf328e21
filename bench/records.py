"""Records: one line per request in ``records.jsonl``, from which every number is computed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

__all__ = [
    "SCHEMA_VERSION",
    "BackgroundRecord",
    "CacheRecord",
    "CallRecord",
    "ErrorInfo",
    "GradeRecord",
    "Outcome",
    "Record",
    "StageRecord",
    "Times",
]

SCHEMA_VERSION = 1
"""Raised whenever a field changes its meaning or goes away; adding one does not raise it."""

Outcome = Literal[
    "ok",
    "truncated",
    "refused",
    "unparsed",
    "infra_error",
    "sandbox_error",
    "timeout",
    "cancelled",
]
"""How a request ended.

``ok``: a complete reply with an answer in it, right or wrong. ``truncated``: cut at max_tokens.
``refused``: the service or engine answered 4xx. ``unparsed``: complete, but no answer in the asked form.
``infra_error``: connection, 5xx, broken stream. ``sandbox_error``: our executor failed (not the program).
``timeout``: over the request's time limit. ``cancelled``: stopped by the user.
Only ``ok`` and ``unparsed`` carry a grade.
"""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Times(_Model):
    """Nanoseconds from the run's start, on the monotonic clock.

    Attributes:
        scheduled: When the load pattern wanted the request sent.
        started: When it was sent.
        received: When the service had it (None where the service's clock is not ours).
        first_token: First delta with any text, reasoning included.
        first_content: First delta with answer text; None for a reply without one.
        finished: When the reply was complete or had failed.
    """

    scheduled: int
    started: int
    received: int | None = None
    first_token: int | None = None
    first_content: int | None = None
    finished: int


class StageRecord(_Model):
    """A named part of the method's work, in nanoseconds from the run's start."""

    name: str
    started: int
    finished: int | None = None


class ErrorInfo(_Model):
    """What failed."""

    type: str
    message: str


class CallRecord(_Model):
    """One engine call; fields as in :class:`bench.engine.EngineCall`, times in ns from the run's start."""

    engine: str
    purpose: str
    model: str | None = None
    started: int | None = None
    first_token: int | None = None
    first_content: int | None = None
    finished: int | None = None
    tokens_in: int | None = None
    tokens_cached: int | None = None
    tokens_out: int | None = None
    tokens_drafted: int | None = None
    tokens_accepted: int | None = None
    prefill_ns: int | None = None
    decode_ns: int | None = None
    finish_reason: str | None = None
    tries: int = 0
    error: ErrorInfo | None = None


class GradeRecord(_Model):
    """Fields as in :class:`bench.workload.Grade`, with the version of the workload that graded."""

    scores: dict[str, FiniteFloat]
    extracted: Any = None
    parsed: bool
    explanation: str
    workload_version: str


class CacheRecord(_Model):
    """Fields as in :class:`bench.method.CacheEvent`."""

    kind: str
    key: str | None = None
    similarity: float | None = None
    reason: str | None = None
    saved_tokens: int | None = None

    @property
    def hit(self) -> bool:
        """Whether the reply came from the cache."""
        return self.kind not in ("none", "miss")


class Record(_Model):
    """One request.

    Attributes:
        run, cell: Where it belongs.
        index: Position in the cell's order, from 0.
        sample, group: The sample's id and its ground-truth template.
        prompt: Digest of the messages: records with one prompt are copies of one question, whatever their
            samples are called. None in records of before there was one.
        repeat: Which pass over the samples, from 0.
        session: Which sitting of the run made it, from 0; a resume begins the next.
        attempt: 1, or more after a resume that repeated a request whose infrastructure had failed.
        phase: ``measure``, or ``warmup`` (never in tables).
        times, stages, calls: What took how long; None/empty where the service told nothing.
        cache: What the cache did; None where the service did not answer.
        outcome: See :data:`Outcome`.
        grade: None where there is nothing to grade.
        reply: The reply's text as received; None where there was none.
        finish_reason, usage: As the service reported them.
        error: None unless something failed.
        details: The method's own facts.
    """

    run: str
    cell: str
    index: int
    sample: str
    group: str | None = None
    prompt: str | None = None
    repeat: int = 0
    session: int = 0
    attempt: int = 1
    phase: Literal["measure", "warmup"] = "measure"
    times: Times
    stages: tuple[StageRecord, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    cache: CacheRecord | None = None
    outcome: Outcome
    grade: GradeRecord | None = None
    reply: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: ErrorInfo | None = None
    details: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """Identity of the request within its run: cell, repeat, index."""
        return (self.cell, self.repeat, self.index)

    @property
    def question(self) -> str:
        """What is one independent observation however often it is asked: the prompt, or else the sample."""
        return self.prompt or self.sample

    @property
    def hit(self) -> bool:
        """Whether the reply came from a cache."""
        return self.cache is not None and self.cache.hit

    @property
    def completed(self) -> bool:
        """Whether the method got to answer (the answer may be wrong, cut or unreadable)."""
        return self.outcome not in ("infra_error", "sandbox_error", "timeout", "cancelled")

    @property
    def latency_ns(self) -> int:
        """End-to-end latency from the *scheduled* time, in ns."""
        return self.times.finished - self.times.scheduled


class BackgroundRecord(_Model):
    """One piece of work that a method did beside the requests; a line of ``background.jsonl``.

    Attributes:
        run, cell: Where it belongs.
        name: What kind of work (``generate``).
        request: Id of the request that set it off.
        session: As in :class:`Record`.
        started, finished: Nanoseconds from the run's start.
        stages, calls: What took how long.
        outcome: ``ok``, ``error`` (an exception ended it) or ``cancelled``.
        error: None unless something failed.
        details: The method's own facts.
    """

    run: str
    cell: str
    name: str
    request: str
    session: int = 0
    started: int
    finished: int
    stages: tuple[StageRecord, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    outcome: Literal["ok", "error", "cancelled"]
    error: ErrorInfo | None = None
    details: dict[str, Any] = Field(default_factory=dict)

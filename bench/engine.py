"""Engines as a method sees them: one instrumented chat client per role, and what a call leaves behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from bench.samples import Message

__all__ = ["Completion", "Emit", "EngineCall", "EngineClient", "Purpose", "Role"]

Role = Literal["target", "small"]
Purpose = Literal["answer", "program", "extract", "generate", "validate", "reflect", "draft"]

Emit = Callable[[str], Awaitable[None]]
"""Takes the next piece of a streamed text."""


@dataclass(slots=True)
class EngineCall:
    """One call to an engine, timed by the client. Missing is None, never 0.

    All ``*_ns`` are readings of the monotonic clock in the process that made the call, until the
    runner rebases them to the run's start.

    Attributes:
        engine: The role that served it.
        purpose: Why the method called.
        model: The name that the engine reports.
        started_ns, finished_ns: Around the whole call, tries and waits included.
        first_token_ns: First delta with any text, reasoning included.
        first_content_ns: First delta with answer text (or tool call).
        tokens_in, tokens_cached, tokens_out: Prompt tokens, those of them that came from the engine's
            prefix cache, and completion tokens, as the engine's usage says.
        tokens_drafted, tokens_accepted: Tokens that the drafter proposed, and those of them that the target
            accepted; None without speculative decoding.
        prefill_ns, decode_ns: The engine's own timings, where it gives them.
        finish_reason: ``stop``, ``length``, ``tool_calls``, … ; None when the call failed.
        tries: How many HTTP requests were made (1 = no retry).
        error: ``{"type", "message"}`` when the call failed.
    """

    engine: Role
    purpose: Purpose
    model: str | None = None
    started_ns: int | None = None
    first_token_ns: int | None = None
    first_content_ns: int | None = None
    finished_ns: int | None = None
    tokens_in: int | None = None
    tokens_cached: int | None = None
    tokens_out: int | None = None
    tokens_drafted: int | None = None
    tokens_accepted: int | None = None
    prefill_ns: int | None = None
    decode_ns: int | None = None
    finish_reason: str | None = None
    tries: int = 0
    error: dict[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answered.

    Attributes:
        text: The answer text. Where an engine put everything into its reasoning channel although
            thinking is off, that text, with ``from_reasoning`` set.
        finish_reason: Why the engine stopped.
        call: The call's record.
        reasoning: Text of the reasoning channel, never graded as an answer.
        from_reasoning: See ``text``.
        tool_calls: In the OpenAI shape; empty where there are none.
    """

    text: str
    finish_reason: str
    call: EngineCall
    reasoning: str = ""
    from_reasoning: bool = False
    tool_calls: tuple[Mapping[str, Any], ...] = field(default=())


class EngineClient(Protocol):
    """The only way by which a method reaches a model; every call is recorded."""

    role: Role

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        purpose: Purpose,
        params: Mapping[str, Any],
        emit: Emit | None = None,
    ) -> Completion:
        """Send one chat request and return its completion.

        Args:
            messages: OpenAI chat messages.
            purpose: Why, for the record.
            params: Further fields of the request body (temperature, max_tokens, stop, …).
            emit: Receives answer text as it arrives.

        Raises:
            EngineError: The call failed after its tries. Never returns a partial completion.
        """
        ...

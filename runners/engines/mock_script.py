"""What a mock engine answers: its script's form, and the reply planned for one request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["Rule", "Script", "Turn", "prompt_text"]

_TOKEN = re.compile(r"\s*\S+|\s+$")

Fault = Literal["400", "429", "500", "disconnect", "cut_stream", "error_event", "stall", "empty", "role_only"]


class Rule(BaseModel):
    """What to answer to which prompts.

    Attributes:
        match: Regular expression, searched in the contents of all messages joined by newlines;
            ``.`` matches newlines too. None matches every prompt.
        reply: Answer text.
        reasoning: Text of the reasoning channel, sent before the answer.
        finish_reason: Unless ``max_tokens`` cuts the reply, which makes it ``length``.
        delay_s: Wait before the first byte, seconds.
        token_delay_s: Wait before each token, seconds. At 0 a stream is sent in one piece.
        fault: ``400``, ``429``, ``500`` (an error answer); ``disconnect`` (closed before any answer);
            ``cut_stream`` (closed half-way); ``error_event`` (half a stream, then an error object);
            ``stall`` (half a stream, then silence); ``empty`` (a whole reply without text);
            ``role_only`` (a stream of the role's delta alone, with no finish reason).
        times: How many matching requests the rule answers; None means all.
        drafted, accepted: Counts of a pretended drafter, given as llama.cpp gives them; None: no drafter.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str | None = None
    reply: str = ""
    reasoning: str = ""
    finish_reason: str = "stop"
    delay_s: float = Field(default=0.0, ge=0)
    token_delay_s: float = Field(default=0.0, ge=0)
    fault: Fault | None = None
    times: int | None = Field(default=None, ge=1)
    drafted: int | None = Field(default=None, ge=0)
    accepted: int | None = Field(default=None, ge=0)

    @field_validator("match")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern


class Script(BaseModel):
    """A mock's whole behaviour.

    Attributes:
        rules: Tried in order.
        default: Reply where no rule answers.
        api_key: Bearer token that requests must carry; None asks for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: tuple[Rule, ...] = ()
    default: str = "OK"
    api_key: str | None = None


class Turn:
    """One request and its planned reply.

    Attributes:
        rule: The rule that answers.
        stream: Whether the request asks for a stream.
        with_usage: Whether its stream ends with a chunk that has the usage.
        deltas: The reply's tokens in order, as (field of the message, text).
        finish_reason: Of the reply.
        prompt_tokens: The prompt's tokens.
        cached: How many of those the pretended prefix cache had.
    """

    def __init__(self, body: Mapping[str, Any], prompt: str, rule: Rule) -> None:
        self.rule = rule
        self.stream = bool(body.get("stream"))
        self.with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        silent = rule.fault in ("empty", "role_only")
        reasoning, text = ("", "") if silent else (rule.reasoning, rule.reply)
        stops = body.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0]
        self.finish_reason = rule.finish_reason
        self.deltas = [("reasoning_content", token) for token in _TOKEN.findall(reasoning)]
        self.deltas += [("content", token) for token in _TOKEN.findall(text)]
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit and len(self.deltas) > limit:
            self.deltas = self.deltas[:limit]
            self.finish_reason = "length"
        self.prompt_tokens = _TOKEN.findall(prompt)
        self.cached = 0

    @property
    def usage(self) -> dict[str, Any]:
        """The `usage` object."""
        prompt, completion = len(self.prompt_tokens), len(self.deltas)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    @property
    def accounts(self) -> dict[str, Any]:
        """What the end of a reply tells of its making: `usage`, and `timings` where a drafter was at work."""
        counts = {"draft_n": self.rule.drafted, "draft_n_accepted": self.rule.accepted}
        return {"usage": self.usage} | ({} if self.rule.drafted is None else {"timings": counts})

    def joined(self, kind: str) -> str:
        """Return the whole text of one field of the message."""
        return "".join(text for key, text in self.deltas if key == kind)


def prompt_text(messages: Any) -> str:
    """Return the contents of all messages, joined by newlines.

    Raises:
        TypeError: ``messages`` is no list.
    """
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
        texts.append(content if isinstance(content, str) else "")
    return "\n".join(texts)

"""Samples: what a workload asks, and the gold that only its grader sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Message", "Sample", "last_user_text", "text_of"]

Message = Mapping[str, Any]
"""One chat message in the OpenAI shape: ``role``, ``content`` (a string, a list of parts or null), …"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a workload with its gold. Immutable.

    The runner sends ``messages`` alone; ``reference``, ``group`` and ``meta`` never reach a method.

    Attributes:
        id: Unique within the workload version.
        messages: The chat messages, in order.
        reference: The gold, JSON-serialisable; its meaning belongs to the workload's grader.
        group: Ground-truth template, if known (for clustering intervals and oracle grouping).
        meta: Free-form facts about the sample (source row, errata, …), JSON-serialisable.
    """

    id: str
    messages: tuple[Message, ...]
    reference: Any
    group: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


def text_of(message: Message) -> str:
    """Return a message's text.

    A content list is joined from its text parts; a null content (as beside tool calls) is empty.
    """
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""


def last_user_text(messages: Sequence[Message]) -> str:
    """Return the text of the last user message, or ``""`` where there is none."""
    return next((text_of(message) for message in reversed(messages) if message.get("role") == "user"), "")

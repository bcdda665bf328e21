"""Control requests to an engine's server: health, models, cache resets. Not for chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

__all__ = ["Answer", "request"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer.

    Attributes:
        status: HTTP status.
        body: The parsed JSON; None where the body is no JSON.
        text: The body as it came.
    """

    status: int
    body: Any
    text: str

    @property
    def said(self) -> str:
        """The server's own error message, or the start of its body; for the end of a message of ours."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or self.text.strip()[:200] or "no message")


async def request(
    method: str,
    url: str,
    *,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> Answer:
    """Send one request on a connection of its own.

    Args:
        method: ``GET`` or ``POST``.
        url: Where to.
        body: Sent as JSON; None sends no body.
        headers: Added to the request.
        timeout_s: Limit for the whole, seconds.

    Raises:
        aiohttp.ClientError, TimeoutError, OSError: No answer came.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
        session.request(method, url, json=body) as response,
    ):
        text = await response.text(errors="replace")
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        return Answer(response.status, parsed, text)

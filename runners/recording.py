"""Recordings: every engine call of a run and what it was answered, so that no one need make it again.

One line per answered call, found by the digest of what was asked. Which engine answered, with which model
file, is in ``run.json``. Failed calls are no answers and are not recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bench.engine import Completion
from runners.journal import LineFile

__all__ = ["Recording", "digest"]

_TRANSPORT = ("stream", "stream_options")


def digest(body: Mapping[str, Any]) -> str:
    """Return what a call is found by: SHA-256 of everything in its request that can change the answer."""
    asked = {key: value for key, value in body.items() if key not in _TRANSPORT}
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Recording(LineFile):
    """One line per answered call; times are durations from the call's start, in nanoseconds."""

    def add(self, body: Mapping[str, Any], completion: Completion) -> None:
        """Write one answered call."""
        if self.path is None:
            return  # what is not kept need not be hashed
        call = completion.call
        start = call.started_ns or 0

        def since(moment: int | None) -> int | None:
            return None if moment is None else moment - start

        self.write_line(
            {
                "asked": digest(body),
                "engine": call.engine,
                "purpose": call.purpose,
                "model": call.model,
                "text": completion.text,
                "reasoning": completion.reasoning,
                "from_reasoning": completion.from_reasoning,
                "tool_calls": list(completion.tool_calls),
                "finish_reason": completion.finish_reason,
                "tokens_in": call.tokens_in,
                "tokens_cached": call.tokens_cached,
                "tokens_out": call.tokens_out,
                "tokens_drafted": call.tokens_drafted,
                "tokens_accepted": call.tokens_accepted,
                "first_token_ns": since(call.first_token_ns),
                "first_content_ns": since(call.first_content_ns),
                "finished_ns": since(call.finished_ns),
                "prefill_ns": call.prefill_ns,
                "decode_ns": call.decode_ns,
            }
        )

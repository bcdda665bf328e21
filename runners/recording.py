"""Recordings: every engine call of a run and what it was answered, so that no one need make it again.

One line per answered call, found by the digest of what was asked. Which engine answered, with which model
file, is in ``run.json``. Failed calls are no answers and are not recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.engine import Completion
from runners.journal import drop_torn_line

__all__ = ["Recording", "digest"]

_TRANSPORT = ("stream", "stream_options")
_PRIVATE = 0o600  # it holds what users were told


def digest(body: Mapping[str, Any]) -> str:
    """Return what a call is found by: SHA-256 of everything in its request that can change the answer."""
    asked = {key: value for key, value in body.items() if key not in _TRANSPORT}
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Recording:
    """Append-only JSON lines; nothing is kept where ``path`` is None.

    Args:
        path: The file. Its times are durations from the call's start, in nanoseconds.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: int | None = None

    def add(self, body: Mapping[str, Any], completion: Completion) -> None:
        """Write one answered call."""
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE)
        call = completion.call
        start = call.started_ns or 0

        def since(moment: int | None) -> int | None:
            return None if moment is None else moment - start

        line = {
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
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file; :meth:`add` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

"""What every engine server offers to the runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from bench.config import EngineConfig
from bench.registry import SPECDEC

__all__ = ["Engine", "place"]


def place(role: str) -> str:
    """Return where an engine's settings stand in a configuration."""
    return "pair.specdec" if role.endswith(SPECDEC) else f"pair.{role}"


class Engine(Protocol):
    """An LLM behind OpenAI-compatible HTTP, with a life of its own. Built as ``cls(config, role)``."""

    config: EngineConfig
    role: str
    """``target``, ``small`` or ``target+specdec``."""

    async def start(self, log_dir: Path) -> str:
        """Make the engine reachable and return its base URL (up to and including ``/v1``).

        Args:
            log_dir: Existing folder for ``<role>.log``.

        Raises:
            ModelMissing: The model file is absent; the message names the command that fetches it.
            EngineUnavailable: It did not come up; the message has the end of its log.
        """
        ...

    async def probe(self) -> dict[str, Any]:
        """Return facts for ``run.json``: kind, model, file hash and size, version, context, slots, …

        Never holds a key or a URL with credentials.
        """
        ...

    async def reset_cache(self) -> bool:
        """Clear the prefix cache; True where that was done, False where the engine can't."""
        ...

    async def stop(self) -> None:
        """Stop what :meth:`start` started. Safe to call twice."""
        ...

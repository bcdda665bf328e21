"""Where the suite keeps what it fetched."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_root"]


def cache_root() -> Path:
    """Return ``${REUSEBENCH_CACHE:-${XDG_CACHE_HOME:-~/.cache}/reusebench}``; it may not exist yet."""
    if own := os.environ.get("REUSEBENCH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "reusebench"

"""Facts about this machine and this software, for ``run.json`` and ``doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import bench

__all__ = ["git_facts", "machine_facts", "package_versions"]


def machine_facts() -> dict[str, Any]:
    """Return CPU, cores, memory (bytes), GPUs, operating system and Python; unknown facts are None."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": _ram(),
        "gpu": _gpus(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def package_versions() -> dict[str, str]:
    """Return the versions of every installed package, by name, sorted; ours is always among them."""
    found = {dist.metadata["Name"]: dist.version for dist in distributions() if dist.metadata["Name"]}
    try:
        found["reusebench"] = version("reusebench")
    except PackageNotFoundError:
        found["reusebench"] = bench.__version__
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def git_facts() -> dict[str, Any] | None:
    """Return the commit of the suite's checkout and whether it has uncommitted changes; None outside one."""
    root = Path(bench.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

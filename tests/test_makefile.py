"""The Makefile's targets, without running them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.search(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)[1].split()  # type: ignore[index]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def dry(target: str, *settings: str, folder: Path = ROOT) -> str:
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target, *settings],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_needs_root(target: str) -> None:
    said = dry(target)
    assert said.strip()
    commands = [line for line in said.splitlines() if "echo" not in line]
    assert not re.search(r"\bsudo\b|\bapt(-get)?\b|/usr/|/etc/", "\n".join(commands))


def test_from_nothing(tmp_path: Path) -> None:
    """In a fresh checkout the environment comes first, then the models, then the runs."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    said = dry("reproduce-all", "PROFILE=paper", "ARGS=-n 3", folder=tmp_path)
    steps = [
        "-m venv",
        "-r requirements.lock",
        "--editable .",
        "models pull",
        "reproduce --profile paper -n 3",
    ]
    places = [said.index(step) for step in steps]
    assert places == sorted(places)
    assert "runs" not in re.findall(r"rm -rf .*", dry("clean"))[0]


def test_help_names_every_target() -> None:
    said = dry("help")
    assert not [name for name in TARGETS if name not in ("help", "lock") and f"make {name}" not in said]

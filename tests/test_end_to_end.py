"""The main job on the real pair, small: what `make reproduce-all` does, with a few samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.records import Record
from runners import models
from runners.store import Run, list_runs

N = 2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        any(models.status(name).state not in ("ready", "unchecked") for name in models.catalogue()),
        reason="the embedded models are not in the store: run `reusebench models pull`",
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.cli",
            "reproduce",
            "minicache-finance",
            "-n",
            str(N),
            "--runs",
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "index.html").exists()
    [found] = list_runs(folder)
    return found


@pytest.fixture(scope="module")
def records(run: Run) -> list[Record]:
    return run.records()


def test_every_cell_is_complete_and_the_run_valid(run: Run, records: list[Record]) -> None:
    facts = run.read()
    assert facts["status"] == "complete"
    assert facts["verdict"] == {"valid": True, "reasons": []}
    assert {record.cell for record in records} == set(facts["planned"])
    assert len(records) == N * len(facts["planned"]) and len(facts["planned"]) >= 10
    assert all(record.completed for record in records)


def test_real_models_answered(run: Run, records: list[Record]) -> None:
    engines = run.read()["engines"]
    for role, model in (("target", "1.5b"), ("small", "0.5b"), ("target+specdec", "1.5b")):
        assert model in engines[role]["model"]
        assert len(engines[role]["sha256"]) == 64
    for record in records:
        assert {call.engine for call in record.calls} == {"target"}  # so few requests are all misses
        assert all((call.tokens_in or 0) > 50 and (call.tokens_out or 0) > 0 for call in record.calls)
        drafted = [call.tokens_drafted for call in record.calls]
        assert all(drafted) if record.cell.endswith("+specdec") else drafted == [None] * len(drafted)


def test_every_engine_call_is_recorded(run: Run, records: list[Record]) -> None:
    for cell in run.read()["planned"]:
        lines = (run.path / "calls" / f"{cell}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == sum(len(record.calls) for record in records if record.cell == cell)


def test_programs_were_written_and_run(records: list[Record]) -> None:
    programs = [record for record in records if record.cell == "formula+pot"]
    assert all("answer" in record.details["program"] for record in programs)
    assert any(record.details["program_status"] == "ok" for record in programs)


def test_each_cell_began_with_an_empty_prefix_cache(run: Run, records: list[Record]) -> None:
    resets = run.read()["cache_resets"]
    assert all(reset for sessions in resets.values() for one in sessions for reset in one.values())
    for cell in run.read()["planned"]:
        first = next(record for record in records if record.cell == cell)
        assert first.calls[0].tokens_cached == 0


def test_common_calls_are_answered_alike(records: list[Record]) -> None:
    """ExactCache's miss path is PoT: the same prompt, the same engine, the same answer."""
    replies = {
        cell: [record.reply for record in records if record.cell == f"formula+{cell}"]
        for cell in ("pot", "exactcache")
    }
    assert replies["pot"] == replies["exactcache"]


def test_the_report_is_whole(run: Run) -> None:
    report = run.path / "report"
    names = {path.name for path in report.iterdir()}
    assert {"index.html", "report.md", "main.csv", "main.tex"} <= names
    assert {Path(name).suffix for name in names} >= {".png", ".svg"}
    text = (report / "report.md").read_text(encoding="utf-8")
    assert "live, laptop pair on this machine" in text


def test_show_prints_json(run: Run) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.cli", "show", str(run.path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = json.loads(done.stdout)
    assert {cell["n"] for cell in shown["cells"]} == {N}

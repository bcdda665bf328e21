from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.errors import ReuseBenchError, UsageError
from bench.records import SCHEMA_VERSION
from runners.store import Run, RunLocked, find_run, list_runs
from tests.synthetic import record


@pytest.fixture
def run(tmp_path: Path) -> Run:
    one = Run.create(tmp_path, "test", {"status": "running"})
    yield one
    one.close()


def test_create(run: Run, tmp_path: Path) -> None:
    facts = run.read()
    assert facts["schema_version"] == SCHEMA_VERSION
    assert facts["id"] == run.id
    assert "-test-" in run.id
    assert run.records() == []
    assert [one.id for one in list_runs(tmp_path)] == [run.id]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Can't make the run's folder"):
        Run.create(tmp_path / "file", "test", {})


def test_records_survive_and_a_torn_line_is_dropped(run: Run) -> None:
    first, second, third = (record(index=index, reply="ü\nx\u2028") for index in range(3))
    run.append(first)
    run.append(second)
    path = run.path / "records.jsonl"
    assert Run(run.path).records() == [first, second]
    with path.open("ab") as file:
        file.write(b'{"run": "r", "cell')
    again = Run(run.path)
    with pytest.warns(UserWarning, match="cut off"):
        assert again.records() == [first, second]
    again.append(third)
    assert again.records() == [first, second, third]
    again.close()


def test_a_damaged_line_is_named(run: Run) -> None:
    run.append(record())
    with (run.path / "records.jsonl").open("ab") as file:
        file.write(b'{"run": "r"}\n')
    with pytest.raises(ReuseBenchError, match="line 2: no valid record"):
        run.records()


def test_one_writer(run: Run) -> None:
    assert not run.written_elsewhere
    with pytest.raises(RunLocked, match="another process") as caught:
        Run(run.path).lock()
    assert caught.value.exit_code == 2
    assert Run(run.path).written_elsewhere
    assert Run(run.path).status == "running"
    run.close()
    other = Run(run.path)
    assert not other.written_elsewhere
    assert other.status == "killed"
    other.update(status="complete")
    assert other.status == "complete"


def test_the_lock_is_not_inherited(run: Run) -> None:
    """A child that outlives the writer must not keep the run locked."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run.close()
    Run(run.path).lock()
    child.communicate(b"\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is no run"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        (json.dumps({"schema_version": SCHEMA_VERSION + 1, "packages": {"reusebench": "9.9"}}), "9.9"),
    ],
)
def test_unreadable_runs(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        Run(tmp_path).read()


def test_nan_is_refused_and_the_old_facts_stay(run: Run) -> None:
    with pytest.raises(ValueError, match="JSON"):
        run.update(number=float("nan"))
    assert "number" not in run.read()
    assert not list(run.path.glob(".run.json*"))


def test_replace_records(run: Run) -> None:
    run.append(record(index=0))
    run.replace_records([record(index=5)])
    run.append(record(index=6))
    assert [one.index for one in run.records()] == [5, 6]


def test_find_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runs under"):
        find_run(tmp_path, "latest")
    for name in ("20260101T000000Z-a-000001", "20260102T000000Z-b-000002", "20260102T000000Z-b-000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "20260103T000000Z-empty-1").mkdir()
    assert find_run(tmp_path, "latest").id.endswith("000003")
    assert find_run(tmp_path, "-a-").id.endswith("000001")
    assert find_run(tmp_path, "20260102T000000Z-b-000002").id.endswith("000002")
    assert find_run(tmp_path / "elsewhere", str(tmp_path / "20260101T000000Z-a-000001")).id.endswith("000001")
    with pytest.raises(UsageError, match="fits 2 runs"):
        find_run(tmp_path, "-b-")
    with pytest.raises(UsageError, match="There is no run"):
        find_run(tmp_path, "zzz")


def test_the_resume_command_can_be_pasted(tmp_path: Path) -> None:
    run = Run(tmp_path / "my runs" / "x")
    assert run.resume_command == f"reusebench resume '{tmp_path}/my runs/x'"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.config import RunConfig, config_hash
from bench.errors import DataMissing, UsageError
from bench.records import SCHEMA_VERSION
from runners.run import resolve
from runners.session import Batch, begin, regrade, take_up, unfinished
from runners.store import Run, RunLocked, list_runs
from tests.running import Watch, config, resume_here, run_here

SECRET = "sk-never-to-be-seen-0123456789"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", SECRET)
        return run_here(tmp_path_factory.mktemp("runs"), config("direct", "exactcache", repeats=2))


def copy(run: Run, to: Path) -> Run:
    import shutil

    return Run(Path(shutil.copytree(run.path, to / run.id)))


def test_run_json(finished: Run) -> None:
    facts = finished.read()
    assert facts["schema_version"] == SCHEMA_VERSION
    assert facts["status"] == "complete"
    assert facts["source"] == "live"
    wanted = resolve(RunConfig.model_validate(config("direct", "exactcache", repeats=2)))
    assert facts["config_hash"] == config_hash(wanted)
    assert [cell["id"] for cell in facts["config"]["cells"]] == ["formula+direct", "formula+exactcache"]
    assert "max_entries" in facts["config"]["cells"][1]["method_config"], "defaults are filled in"
    if facts["git"] is not None:
        assert len(facts["git"]["commit"]) == 40
        assert facts["git"]["dirty"] in (True, False)
    assert {"reusebench", "pydantic", "aiohttp"} <= set(facts["packages"])
    assert facts["machine"]["cores"] >= 1 and facts["machine"]["python"].startswith("3.")
    assert facts["engines"]["target"]["kind"] == "mock"
    assert facts["engines"]["small"] is None, "no method here calls it"
    for cell in ("formula+direct", "formula+exactcache"):
        assert len(facts["datasets"][cell]["sha256"]) == 64
        assert facts["planned"][cell] == 6
        assert facts["seeds"][cell] == 0
        assert facts["cache_resets"][cell] == [{"target": True}]
    assert facts["workloads"]["formula"]["primary_score"] in facts["workloads"]["formula"]["scores"]
    assert "verdict" in facts

    def refuse(text: str) -> Any:
        raise AssertionError(text)

    for line in (finished.path / "records.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_no_secret_is_kept(finished: Run) -> None:
    files = [path for path in finished.path.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_nothing_to_resume(finished: Run, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    before = run.records()
    watch = Watch()
    resume_here(run, watch)
    assert watch.cells == []
    assert run.records() == before
    assert run.status == "complete"


def test_a_wrong_configuration_makes_no_folder(tmp_path: Path) -> None:
    def attempt(error: type[Exception], said: str, **changes: Any) -> None:
        data = config("direct")
        data["cells"][0].update(changes)
        data["baseline"] = None
        with pytest.raises(error, match=said):
            begin(tmp_path / "runs", RunConfig.model_validate(data), None)

    attempt(UsageError, "no method", method="dirrect")
    attempt(UsageError, "no workload", workload="formulas")
    attempt(UsageError, "engine", method_config={"engne": "small"})
    attempt(DataMissing, "absent.jsonl", selection={"source": "path", "path": str(tmp_path / "absent.jsonl")})
    (tmp_path / "empty.jsonl").touch()
    attempt(DataMissing, "empty.jsonl", selection={"source": "path", "path": str(tmp_path / "empty.jsonl")})
    (tmp_path / "odd.jsonl").write_text('{"colour": "red"}\n')
    attempt(DataMissing, "odd.jsonl", selection={"source": "path", "path": str(tmp_path / "odd.jsonl")})
    assert not (tmp_path / "runs").exists()


def test_other_data_is_not_mixed_in(finished: Run, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    facts = run.read()
    facts["datasets"]["formula+direct"]["sha256"] = "0" * 64
    run.write(facts)
    with pytest.raises(UsageError, match="no longer what the run began with"):
        take_up(run)
    run.close()
    with pytest.raises(UsageError, match="no longer what the run began with"):
        regrade(run, write=False)


def test_another_version_is_not_mixed_in(finished: Run, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    facts = run.read()
    facts["workloads"]["formula"]["version"] = "0"
    run.write(facts)
    with pytest.raises(UsageError, match="the run began with 0"):
        take_up(run)
    run.close()


def test_two_processes_cannot_take_up_one_run(finished: Run, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    run.lock()
    for attempt in (take_up, lambda one: regrade(one, write=True)):
        with pytest.raises(RunLocked):
            attempt(Run(run.path))
    run.close()


def test_unfinished(finished: Run, tmp_path: Path) -> None:
    data = RunConfig.model_validate(config("direct", "exactcache", repeats=2))
    other = RunConfig.model_validate(config("direct", "exactcache", repeats=3))
    assert unfinished(tmp_path, data) is None
    run = copy(finished, tmp_path)
    assert unfinished(tmp_path, data) is None, "it is complete"
    for status in ("interrupted", "failed", "running"):
        run.update(status=status)
        found = unfinished(tmp_path, data)
        assert found is not None and found.id == run.id
        assert unfinished(tmp_path, other) is None
    damaged = tmp_path / "99990101T000000Z-x-1"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    assert len(list_runs(tmp_path)) == 2
    found = unfinished(tmp_path, data)
    assert found is not None and found.id == run.id


def test_batch(finished: Run, tmp_path: Path) -> None:
    """What is done is kept, what is not is gone on with, and what can't be read is begun anew."""
    wanted = RunConfig.model_validate(config("direct", "exactcache", repeats=2))
    run = copy(finished, tmp_path)
    file = tmp_path / "reproduce.json"
    Batch(tmp_path, [wanted], fresh=False).note(wanted, run)
    kept = file.read_text()

    def find(*, fresh: bool = False, configs: int = 1) -> tuple[str | None, bool]:
        found, done = Batch(tmp_path, [wanted] * configs, fresh=fresh).find(wanted)
        return (found.id if found else None), done

    run.update(verdict=None)
    assert find() == (run.id, True), "it was stopped before its report"
    run.update(verdict={"valid": True, "reasons": []})
    assert find() == (run.id, True)
    assert find(fresh=True) == find(configs=2) == (None, False)
    run.update(verdict={"valid": False, "reasons": []})
    assert find() == (None, False), "no request is left that could cure it"
    records = run.records()
    failed = records[0].model_copy(update={"outcome": "infra_error", "reply": None, "grade": None})
    run.replace_records([failed, *records[1:]])
    assert find() == (run.id, False)
    run.replace_records(records)
    run.update(status="interrupted")
    assert find() == (run.id, False)

    for damaged in ("{", "[]", "null", kept.replace(run.id, "gone"), kept.replace(f'"{run.id}"', "5")):
        file.write_text(damaged)
        assert find() == (run.id, False), "a stopped run is gone on with in no batch too"
    file.write_text(kept)
    (run.path / "records.jsonl").write_text("{}\n")
    for status in ("complete", "interrupted"):
        run.update(status=status)
        assert find() == (None, False)
    (run.path / "run.json").write_text("[]")
    assert find() == (None, False)


def test_regrade(finished: Run, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    same = regrade(run, write=False)
    records = run.records()
    graded = sum(record.grade is not None for record in records)
    assert (same.graded, same.changed) == (graded, [])

    changed = records[0].model_copy(update={"reply": "no number at all"})
    kept = records[1].model_copy(update={"reply": None, "outcome": "infra_error", "grade": None})
    run.replace_records([changed, kept, *records[2:]])
    result = regrade(run, write=False)
    assert result.graded == graded - 1
    ((before, after),) = result.changed
    assert before == changed
    assert after.outcome == "unparsed" and after.grade is not None and not after.grade.parsed
    assert run.records()[0] == changed, "nothing is written unasked"
    regrade(run, write=True)
    run.close()
    assert run.records()[0] == after
    assert run.records()[1:] == [kept, *records[2:]]
    assert regrade(run, write=False).changed == []


def test_restarts_add_up() -> None:
    from runners.run import _engine_facts

    before = {"target": {"kind": "llamacpp", "restarts": 2}, "small": None}
    now = {"target": {"kind": "llamacpp", "restarts": 1}, "small": None}
    assert _engine_facts(before, now) == {"target": {"kind": "llamacpp", "restarts": 3}, "small": None}
    assert _engine_facts({}, {"target": {"kind": "mock"}}) == {"target": {"kind": "mock"}}

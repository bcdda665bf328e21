from __future__ import annotations

import random
import shlex
import signal
import subprocess
import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.errors import EngineUnavailable
from reports.verdict import verdict
from runners.store import Run, list_runs
from tests.running import (
    COMMAND,
    PROGRAM,
    Watch,
    asks,
    change_config,
    complete_lines,
    config,
    essences,
    kill_services,
    names_of,
    resume_here,
    run_here,
    samples,
    services,
    spawn,
    tagged,
    wait_for,
    write_config,
)

N, REPEATS = 6, 2
BROKEN = config("pot", "exactcache", n=N, repeats=REPEATS)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_here(tmp_path_factory.mktemp("unbroken"), BROKEN)


@pytest.fixture
def tag() -> Iterator[str]:
    """Marks the processes of a test; afterwards none of them may live."""
    name = uuid.uuid4().hex
    yield name
    wait_for(lambda: not tagged(name), "orphans to end", 10)


def test_unbroken_run(unbroken: Run) -> None:
    facts, records = unbroken.read(), unbroken.records()
    assert facts["status"] == "complete"
    assert len(records) == 2 * N * REPEATS
    exact = [record for record in records if record.cell == "formula+exactcache"]
    assert [record.hit for record in exact] == [False] * N + [True] * N
    assert not [call for record in exact if record.hit for call in record.calls]
    assert {record.details["program_status"] for record in records} == {"ok", "error", None}
    assert verdict(facts, records) == {"valid": True, "reasons": []}
    assert services() == []


def test_kill_9_loses_no_finished_record(unbroken: Run, tmp_path: Path, tag: str) -> None:
    """Killed again and again at moments that a seed chooses, then finished: as if never broken."""
    root = tmp_path / "runs"
    file = write_config(
        tmp_path / "run.toml", config("pot", "exactcache", n=N, repeats=REPEATS, delay_s=0.002)
    )
    moments = sorted(random.Random(7).sample(range(1, 2 * N * REPEATS - 1), 4))
    arguments: list[Any] = ["run", "--config", file, "--runs", root]
    for number, moment in enumerate(moments):
        before = complete_lines(root)
        process = spawn(tag, *arguments)
        wait_for(lambda m=moment: len(complete_lines(root)) >= m or process.poll() is not None, "records")
        seen = complete_lines(root)
        process.kill()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL, errors
        after = complete_lines(root)
        assert after[: len(before)] == before
        assert after[: len(seen)] == seen
        assert len(seen) >= moment
        (run,) = list_runs(root)
        assert run.status == "killed"
        arguments = ["resume", run.id, "--runs", root]
        if number == 1:  # as if that kill had hit the middle of a line
            with (run.path / "records.jsonl").open("ab") as records:
                records.write(seen[0][: len(seen[0]) // 2])
        if number == 2:
            assert "the last line was cut off" in errors
        wait_for(lambda: not tagged(tag), "the services to end with their parent", 10)
    finished = resume_here(run)
    assert finished.read()["status"] == "complete"
    assert essences(finished) == essences(unbroken)


def test_state_without_its_record_never_happened(unbroken: Run, tmp_path: Path) -> None:
    """The kill may come between the journal's line and the record's."""
    run = run_here(tmp_path, config("exactcache", n=4, repeats=2))
    whole = essences(run)
    path = run.path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    state = run.path / "cache" / "formula+exactcache.jsonl"
    state.write_bytes(state.read_bytes() + b'{"request": "torn')
    watch = Watch()
    resumed = resume_here(run, watch)
    assert watch.cells == [("formula+exactcache", 2, 8)]
    assert names_of(watch.records) == ["ok"] * 6
    assert [record.hit for record in watch.records] == [False, False, True, True, True, True]
    assert essences(resumed) == whole


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_stopped_in_order(unbroken: Run, tmp_path: Path, tag: str, signals: list[signal.Signals]) -> None:
    file = write_config(
        tmp_path / "run.toml", config("pot", "exactcache", n=N, repeats=REPEATS, delay_s=0.01)
    )
    process = spawn(tag, "run", "--config", file, "--runs", tmp_path)
    wait_for(lambda: len(complete_lines(tmp_path)) >= 3, "records")
    for number in signals:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    (run,) = list_runs(tmp_path)
    assert process.returncode == 130, errors
    assert run.status == "interrupted"
    assert f"reusebench resume {run.path}" in errors
    assert "Traceback" not in errors
    assert len(run.records()) >= 3
    assert essences(resume_here(run)) == essences(unbroken)


def cured(data: dict[str, Any]) -> None:
    data["pair"]["target"]["script"] = {"default": PROGRAM, "rules": [], "api_key": None}


def test_failures_and_their_cure(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"fault": "500"},
        {"fault": "disconnect"},
        {"reply": "Answer: 1.00 and more", "fault": "cut_stream"},
        {"reply": "Answer: 1.00 and more", "fault": "error_event"},
        {"reply": "Answer: 1.00"},
        {"reply": "Answer: 1.00 and more", "fault": "stall"},
        {"fault": "400"},
        {"reply": "Answer: 1.00", "finish_reason": "length"},
        {"reply": "I would rather not say."},
        {"reply": "Answer: 2.00", "fault": "role_only"},
    ]
    asked = samples(len(faults))
    rules = [{**rule, "match": asks(sample)} for rule, sample in zip(faults, asked, strict=True)]
    run = run_here(
        tmp_path, config("direct", n=len(faults), script={"rules": rules}, timeout_s=1.0, stream=True)
    )
    records = run.records()
    assert names_of(records) == [
        "infra_error",
        "infra_error",
        "infra_error",
        "infra_error",
        "ok",
        "timeout",
        "refused",
        "truncated",
        "unparsed",
        records[9].outcome,
    ]
    types = [record.error.type if record.error else None for record in records]
    assert types[:4] == ["http_500", "connection", "truncated_stream", "mock_error"]
    assert types[4:9] == [None, "timeout", "refused", None, None]
    for record in records:
        assert (record.grade is not None) == (record.outcome in ("ok", "unparsed")), record.outcome
        assert (record.error is not None) == (record.outcome not in ("ok", "truncated", "unparsed"))
    ruling = verdict(run.read(), records)
    assert not ruling["valid"]
    assert "resume" in ruling["reasons"][0]["remedy"]

    change_config(run, cured)
    watch = Watch()
    resumed = resume_here(run, watch)
    again = [record.index for record in records if not record.completed]
    assert [(record.index, record.attempt) for record in watch.records] == [(index, 2) for index in again]
    assert resumed.records()[: len(records)] == records
    assert {record.session for record in records} == {0}
    assert {record.session for record in resumed.records()[len(records) :]} == {1}
    ruling = verdict(resumed.read(), resumed.records())
    assert ruling == {"valid": True, "reasons": []}


@pytest.mark.parametrize(("fault", "outcome"), [("500", "infra_error"), ("stall", "timeout")])
def test_failures_in_a_row_stop_the_run(tmp_path: Path, fault: str, outcome: str) -> None:
    script = {"rules": [{"reply": "one two three", "fault": fault}]}
    data = config("direct", n=8, script=script, timeout_s=0.3)
    with pytest.raises(EngineUnavailable, match="5 requests in a row failed") as caught:
        run_here(tmp_path, data)
    (run,) = list_runs(tmp_path)
    assert names_of(run.records()) == [outcome] * 5
    assert f"reusebench resume {run.path}" in str(caught.value)
    facts = run.read()
    assert facts["status"] == "failed"
    assert facts["failure"]["type"] == "EngineUnavailable"
    assert services() == []

    change_config(run, cured)
    resumed = resume_here(run)
    assert "failure" not in resumed.read()
    assert names_of(resumed.records()[5:]) == ["ok"] * 8


def test_a_failure_between_successes_does_not_count(tmp_path: Path) -> None:
    bad = [{"match": asks(sample), "fault": "500"} for sample in samples(12)[::2]]
    run = run_here(tmp_path, config("direct", n=12, script={"rules": bad, "default": "Answer: 1.00"}))
    assert names_of(run.records()) == ["infra_error", "ok"] * 6
    assert run.read()["status"] == "complete"


def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    data = config("exactcache", n=5, repeats=2, script={"rules": [{"reply": PROGRAM}]}, delay_s=0.05)
    kills: list[threading.Timer] = []

    def kill(done: int) -> None:
        if done == 2:
            kills.append(threading.Timer(0.08, kill_services))  # within the third request
            kills[-1].start()
        if done == 7:
            kill_services()  # between two requests

    watch = Watch(kill)
    run = run_here(tmp_path, data, watch)
    kills[0].join()
    records = run.records()
    assert len(records) == 10
    assert names_of(records).count("infra_error") == 1
    assert records[2].outcome == "infra_error"
    resumed = resume_here(run)
    assert verdict(resumed.read(), resumed.records())["valid"]
    whole = run_here(tmp_path / "whole", data)
    mine = [one for one in essences(resumed) if (one["repeat"], one["index"]) != (0, 2)]
    other = [one for one in essences(whole) if (one["repeat"], one["index"]) not in ((0, 2), (1, 2))]
    # The second pass over that sample found no entry, so it was a miss here and made one.
    assert [one for one in mine if (one["repeat"], one["index"]) != (1, 2)] == other


def test_a_timed_out_request_leaves_nothing_behind(tmp_path: Path) -> None:
    """What it does to the state after its time is up would make its own repetition a hit."""
    (slow, _, _) = samples(3)
    late = {"match": asks(slow), "reply": PROGRAM, "delay_s": 1.0}
    data = config("exactcache", n=3, repeats=2, script={"rules": [late], "default": PROGRAM}, timeout_s=0.8)
    run = run_here(tmp_path, data)
    records = run.records()
    assert names_of(records) == ["timeout", "ok", "ok", "timeout", "ok", "ok"]
    assert [record.hit for record in records] == [False, False, False, False, True, True]
    change_config(run, cured)
    again = resume_here(run).records()[6:]
    assert [(record.repeat, record.index, record.hit) for record in again] == [(0, 0, False), (1, 0, True)]


def test_times_follow_each_other(unbroken: Run) -> None:
    last = 0
    for record in unbroken.records():
        times = record.times
        assert last <= times.scheduled <= times.started
        assert times.received is not None and times.first_content is not None
        assert times.started <= times.received <= times.finished
        assert times.started <= times.first_content <= times.finished
        for call in record.calls:
            assert call.started is not None and call.finished is not None
            assert times.received <= call.started <= call.finished <= times.finished
        for stage in record.stages:
            assert stage.finished is not None
            assert times.received <= stage.started <= stage.finished <= times.finished
        last = times.finished


def test_a_bug_does_not_leave_a_run_running(tmp_path: Path) -> None:
    def stumble(done: int) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        run_here(tmp_path, config("direct"), Watch(stumble))
    (run,) = list_runs(tmp_path)
    assert run.status == "failed"
    assert services() == []


def test_disk_full(tmp_path: Path) -> None:
    """The file-size limit stands in for a full disk: the record is refused, the ones before it stay."""
    file = write_config(tmp_path / "run.toml", config("direct", n=12))
    line = shlex.join([*COMMAND, "run", "--config", str(file), "--runs", str(tmp_path)])
    command = f"ulimit -f 8; exec {line}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    (run,) = list_runs(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Can't write to" in done.stderr and "reusebench resume" in done.stderr
    assert "Traceback" not in done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the line that is torn, unless the limit fell between two
        before = run.records()
        records = resume_here(run).records()
    assert 0 < len(before) < 12
    assert records[: len(before)] == before
    assert [record.index for record in records] == list(range(12))

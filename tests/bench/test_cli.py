"""The command line: in this process where only words and exit codes matter, in another for the real thing."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bench.cli import app, main
from bench.config import RunConfig
from bench.plans import experiment, experiment_names, experiment_run, profile
from runners.session import begin, drive
from runners.store import Run, list_runs
from tests.running import COMMAND, PROGRAM, Watch, asks, config, environment, run_here, samples, write_config

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command line here and return its exit code, stdout and stderr."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("REUSEBENCH_RUNS", raising=False)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        code = ended.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return call


def read_json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} in the output")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A complete run that the command line made, report and all."""
    folder = tmp_path_factory.mktemp("cli")
    file = write_config(folder / "run.toml", config("direct", "exactcache", repeats=2))
    done = subprocess.run(
        [*COMMAND, "run", "--config", str(file), "--runs", str(folder / "runs")],
        env=environment("cli"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(folder / "runs")
    assert f"run {run.id}" in done.stderr
    assert "formula+exactcache: 6/6" in done.stderr
    assert "VALID" in done.stdout and "ExactCache" in done.stdout
    assert str(run.path / "report" / "index.html") in done.stderr
    assert (run.path / "report" / "index.html").stat().st_size > 1000
    return run


@pytest.fixture
def copied(finished: Run, tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(finished.path, tmp_path / "runs" / finished.id)))


def commands() -> list[tuple[str, ...]]:
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found += [(name, sub) for sub in getattr(command, "commands", {})] or [(name,)]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_has_an_example(invoke: Invoke, command: tuple[str, ...]) -> None:
    code, said, _ = invoke(*command, "--help")
    assert code == 0
    assert f"$ reusebench {' '.join(command)}" in " ".join(said.split())
    assert invoke(*command, "-h")[1] == said


def test_every_command_is_there(invoke: Invoke) -> None:
    code, said, _ = invoke("--help")
    assert code == 0
    for name in (
        "list",
        "doctor",
        "serve",
        "run",
        "resume",
        "score",
        "show",
        "report",
        "reproduce",
        "models",
    ):
        assert re.search(rf"^│ {name} ", said, re.MULTILINE), name
    assert "Exit codes: 0 ok" in said
    assert invoke("--version")[1].startswith("reusebench ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("modles", 'no command "modles". Did you mean "models"?'),
        ("models lst", 'no command "lst". Did you mean "list"?'),
        ("run --metod direct", "--method"),
        ("run -m dirrect", 'no method "dirrect". Did you mean "direct"'),
        ("run -m direct -w formulas", 'no workload "formulas". Did you mean "formula"?'),
        ("run -m direct --profile labtop", 'no profile "labtop". Did you mean "laptop"?'),
        ("run -m direct --set pair.targt.kind=mock", 'pair.targt: unknown key Did you mean "target"?'),
        ("run -m direct --set pair.target.kind=mok", 'no engine "mok". Did you mean "mock"?'),
        ("run -m direct --set cells.0.method_config.engne=small", 'unknown key Did you mean "engine"?'),
        ("run -m direct --set threads", "--set takes KEY=VALUE"),
        ("run -m direct --baseline dirrect", 'Did you mean "direct"?'),
        ("run -m direct -m direct", "two cells are called 'formula+direct'"),
        ("run -m direct -n 0", "greater than or equal to 1"),
        ("run -m direct -n many", "valid integer"),
        ("run -m direct --engine localhost:8000", "must begin with http://"),
        ("run -m direct --engine http://u:p@localhost/v1", "credentials"),
        ("run -m direct --engine http://localhost:1", "must end with /v1"),
        ("run --config good.toml --set pair.small=0", "pair.small"),
        ("run --config lone.toml", "This profile has no small engine; set pair.small"),
        ("run", "Name at least one --method"),
        ("run --config absent.toml", "Can't read absent.toml"),
        ("run --config bad.toml", "bad.toml is not valid TOML"),
        ("run --config empty.toml", "cells: Field required"),
        ("run --config good.toml -m direct", "instead of --method"),
        ("run --config good.toml --engine http://x/v1", "instead of --engine"),
        ("run --config good.toml -n 3", "instead of -n"),
        ("run --config good.toml --set baseline=pott", 'Did you mean "pot"?'),
        (
            "reproduce minicache-finanse",
            'no experiment "minicache-finanse". Did you mean "minicache-finance"',
        ),
        ("reproduce -n 0", "greater than or equal to 1"),
        ("reproduce --set cells.99.n=1", "no index of a list"),
        ("resume latest", "no runs under"),
        ("score latest", "no runs under"),
        ("show x", "no runs under"),
        ("report x", "no runs under"),
        ("models pull qwen2.5-coder-1.5b", 'Did you mean "qwen2.5-coder-1.5b-instruct-q4_k_m"'),
        ("models pull --source hubb", 'no model source "hubb". Did you mean "hub"?'),
        ("models verify nothing", 'no model "nothing"'),
        ("doctor --profile labtop", 'no profile "labtop"'),
        ("serve exctcache --profile laptop", 'no method "exctcache". Did you mean "exactcache"'),
        ("serve pot --api-key-env REUSEBENCH_ABSENT", "that variable is not set"),
    ],
)
def test_usage_errors(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    """Exit code 2, the cause and the cure, at once: no engine is started and no folder made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.toml").write_text("cells = [")
    (tmp_path / "empty.toml").write_text("")
    write_config(tmp_path / "good.toml", config("pot"))
    lone = config("pot-small")
    del lone["pair"]["small"]
    write_config(tmp_path / "lone.toml", lone)
    code, _, errors = invoke(*arguments.split())
    assert said in " ".join(errors.replace("│", " ").split())
    assert code == 2
    assert "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [None, "", '{"colour": "red"}\n', "[1, 2"])
def test_missing_data_loses_nothing(invoke: Invoke, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    code, _, errors = invoke("run", "-m", "direct", "--path", path, "--runs", tmp_path / "runs")
    assert code == 4
    assert "data.jsonl" in errors
    assert not (tmp_path / "runs").exists()


def test_missing_model(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path / "cache"))
    code, said, errors = invoke("run", "-m", "direct", "-n", 1, "--runs", tmp_path / "runs")
    assert code == 4
    assert "reusebench models pull" in errors
    assert said == "", "there is nothing to show"
    for run in list_runs(tmp_path / "runs"):
        assert run.status == "failed"
        assert "models pull" in run.read()["failure"]["message"]


def test_engine_out_of_reach(invoke: Invoke, tmp_path: Path) -> None:
    engine = ["--engine", "http://127.0.0.1:9/v1", "--model", "m"]
    code, _, errors = invoke("run", "-m", "direct", "-n", 1, *engine, "--runs", tmp_path)
    assert code == 4
    assert "can't be reached" in errors


def test_invalid_run(invoke: Invoke, tmp_path: Path) -> None:
    fault = {"rules": [{"match": asks(samples(2)[1]), "fault": "500"}], "default": "Answer: 1.00"}
    file = write_config(tmp_path / "run.toml", config("direct", n=2, script=fault))
    code, said, errors = invoke("run", "--config", file, "--runs", tmp_path / "runs")
    (run,) = list_runs(tmp_path / "runs")
    assert code == 3
    assert "INVALID" in said
    assert "formula+direct #1: infra_error: HTTP 502: HTTP 500: scripted 500" in " ".join(errors.split())
    assert f"reusebench resume {run.id}" in errors
    code, said, _ = invoke("list", "--runs", tmp_path / "runs")
    assert (code, "complete, INVALID" in said) == (0, True)


def test_resume_elsewhere_is_locked(invoke: Invoke, copied: Run) -> None:
    copied.lock()
    for command in (["resume"], ["score", "--write"]):
        code, _, errors = invoke(*command, "latest", "--runs", copied.path.parent)
        assert (code, "is being written by another process" in errors) == (2, True)
    copied.close()


def test_report_of_a_run_that_is_being_written(invoke: Invoke, copied: Run) -> None:
    """It may be looked at; what its writer has yet to say must not be overwritten."""
    copied.update(status="running", verdict=None)
    shutil.rmtree(copied.path / "report")
    copied.lock()
    code, said, _ = invoke("report", "latest", "--runs", copied.path.parent)
    assert (code, "ExactCache" in said) == (0, True)
    assert (copied.path / "report" / "index.html").exists()
    assert copied.read()["verdict"] is None
    copied.close()


def test_list(invoke: Invoke, copied: Run) -> None:
    killed = copied.path.parent / "20260101T000000Z-killed-1"
    shutil.copytree(copied.path, killed)
    Run(killed).update(status="running", verdict=None)
    damaged = copied.path.parent / "20260101T000000Z-damaged-1"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    code, said, _ = invoke("list", "--json", "--runs", copied.path.parent)
    assert code == 0
    listed = {
        kind: {entry["name"]: entry["about"] for entry in all_} for kind, all_ in read_json(said).items()
    }
    assert {"direct", "pot", "exactcache", "pot-small"} <= set(listed["methods"])
    assert set(listed) == {"methods", "workloads", "experiments", "profiles", "engines", "runs"}
    assert all(about for kind in listed.values() for about in kind.values())
    assert not [about for kind in listed.values() for about in kind.values() if "`" in about]
    runs = listed["runs"]
    assert runs[copied.id] == "complete, VALID"
    assert runs[killed.name] == "killed"
    assert "is damaged" in runs[damaged.name]
    code, said, _ = invoke("list", "--runs", copied.path.parent)
    assert (code, copied.id in said, "minicache-finance" in said) == (0, True, True)


def test_show(invoke: Invoke, finished: Run) -> None:
    code, said, _ = invoke("show", "latest", "--json", "--runs", finished.path.parent)
    shown = read_json(said)
    assert code == 0
    assert shown["run"] == finished.id and shown["status"] == "complete"
    assert shown["verdict"]["valid"] is True
    cells = {cell["method"]: cell for cell in shown["cells"]}
    assert cells["exactcache"]["outcomes"] == {"ok": 6}
    assert cells["exactcache"]["values"]["hit_rate"] == 0.5
    assert cells["direct"]["values"]["hit_rate"] is None
    code, said, _ = invoke("show", finished.path)
    assert (code, "ExactCache" in said) == (0, True)


def test_show_tells_the_story_of_a_sample(invoke: Invoke, finished: Run) -> None:
    runs = ["--runs", str(finished.path.parent)]
    sample = samples(3)[0].id
    code, said, _ = invoke("show", "latest", "--sample", sample, *runs)
    assert code == 0
    assert said.count(f"sample {sample}") == 4  # two cells, two passes
    assert "hit (exact)" in said and "target engine, " in said
    code, said, _ = invoke("show", "latest", "--sample", sample, "--cell", "formula+exactcache", *runs)
    assert (code, said.count(f"sample {sample}"), "formula+direct" in said) == (0, 2, False)
    code, said, _ = invoke("show", "latest", "--sample", sample, "--json", *runs)
    told = read_json(said)
    assert code == 0 and {one["sample"] for one in told} == {sample}
    assert [one["background"] for one in told] == [[]] * 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sample", "{sample}x"], 'mean "{sample}"'),
        (["--sample", "{sample}", "--cell", "formula+exactcach"], 'mean "formula+exactcache"'),
        (["--cell", "formula+direct"], "--cell goes with --sample"),
    ],
)
def test_show_of_what_is_not_there(invoke: Invoke, finished: Run, arguments: list[str], said: str) -> None:
    sample = samples(3)[0].id
    given = [one.format(sample=sample) for one in arguments]
    code, _, error = invoke("show", "latest", *given, "--runs", finished.path.parent)
    assert code == 2 and said.format(sample=sample) in " ".join(error.split())


def test_score(invoke: Invoke, copied: Run) -> None:
    runs = ["--runs", str(copied.path.parent)]
    code, said, _ = invoke("score", "latest", *runs)
    assert (code, said.strip()) == (0, "12 graded, 0 changed")
    records = copied.records()
    sample = samples(3)[0]
    copied.replace_records(
        [records[0].model_copy(update={"reply": f"Answer: {sample.reference}"}), *records[1:]]
    )
    before = (copied.path / "report" / "index.html").read_bytes()
    code, said, _ = invoke("score", "latest", *runs)
    assert code == 0
    assert f"formula+direct {sample.id}: " in said
    assert "12 graded, 1 changed; --write stores them" in said
    code, said, _ = invoke("score", "latest", "--write", "--json", *runs)
    told = read_json(said)
    assert (code, told["graded"], told["written"]) == (0, 12, True)
    (change,) = told["changed"]
    assert (change["before"]["scores"]["strict"], change["after"]["scores"]["strict"]) == (0, 1)
    stored = copied.records()
    assert stored[0].grade is not None and stored[0].grade.scores["strict"] == 1
    assert stored[1:] == records[1:]
    assert (copied.path / "report" / "index.html").read_bytes() != before, "the report follows"
    assert invoke("score", "latest", *runs)[1].strip() == "12 graded, 0 changed"
    assert not list(copied.path.glob(".*partial"))


def test_report(invoke: Invoke, copied: Run) -> None:
    shutil.rmtree(copied.path / "report")
    code, said, errors = invoke("report", "latest", "--runs", copied.path.parent)
    assert (code, "ExactCache" in said) == (0, True)
    assert str(copied.path / "report" / "index.html") in errors
    assert {"index.html", "report.md", "main.csv", "main.tex"} <= {
        path.name for path in (copied.path / "report").iterdir()
    }


def test_doctor(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path))
    code, said, _ = invoke("doctor", "--no-engines", "--runs", tmp_path)
    assert code == 1
    assert re.search(r"^FAIL model: target: .*absent$", said, re.MULTILINE)
    assert "cure: reusebench models pull" in said
    code, said, _ = invoke("doctor", "--no-engines", "--json", "--runs", tmp_path)
    checks = {check["name"]: check for check in read_json(said)}
    assert code == 1
    assert not checks["model: small"]["ok"] and checks["python"]["ok"]
    monkeypatch.setattr("runners.doctor._models", lambda profile: iter(()))
    monkeypatch.setattr("runners.doctor._FREE_BYTES", 1)
    assert invoke("doctor", "--no-engines", "--runs", tmp_path)[0] == 0


def test_models_list(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSEBENCH_CACHE", str(tmp_path))
    code, said, _ = invoke("models", "list", "--json")
    models = read_json(said)
    assert code == 0
    assert {model["state"] for model in models} == {"absent"}
    assert all(len(model["sha256"]) == 64 and model["bytes"] > 0 for model in models)
    code, said, _ = invoke("models", "list")
    assert (code, models[0]["name"] in said) == (0, True)
    code, _, errors = invoke("models", "verify", models[0]["name"])
    assert (code, "models pull" in errors) == (4, True)


def test_models_verify_checks_every_model(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.errors import ModelMissing
    from runners.models import catalogue

    first, *others = catalogue()
    assert others

    def verify(name: str, progress: Any = None) -> Path:
        if name == first:
            raise ModelMissing(f"{name} is damaged")
        return tmp_path / name

    monkeypatch.setattr("runners.models.verify", verify)
    code, said, errors = invoke("models", "verify", "--json")
    assert code == 4
    verdicts = {one["name"]: (one["ok"], one["detail"]) for one in read_json(said)}
    assert verdicts == {
        first: (False, f"{first} is damaged"),
        **{name: (True, f"{tmp_path / name} is as pinned") for name in others},
    }
    assert all(f"{name}: " in " ".join(errors.split()) for name in (first, *others))
    assert invoke("models", "verify", *others)[0] == 0


def test_the_report_names_the_command(invoke: Invoke, tmp_path: Path) -> None:
    shown = {}
    rows = (
        ["run", "-m", "direct", "-n", "2", *MOCK[:2]],
        ["reproduce", "minicache-finance", "-n", "5", *MOCK],
    )
    for row in rows:
        root = tmp_path / row[0]
        arguments = [*row, "--runs", str(root)]
        code, _, errors = invoke(*arguments)
        assert code == 0, errors
        (run,) = list_runs(root)
        wanted = shlex.join(["reusebench", *arguments])
        assert run.read()["command"] == wanted
        page = html.unescape((run.path / "report" / "index.html").read_text())
        assert wanted in page.replace("\u200b", ""), row
        shown[row[0]] = wanted
    assert "--set pair.target.kind=mock" in shown["run"]
    assert "reproduce minicache-finance -n 5 --set" in shown["reproduce"]


SINGLE = 'cells=[{method="direct", workload="formula", selection={n=2}}]'
MOCK = ["--set", "pair.target.kind=mock", "--set", "baseline=direct", "--set", SINGLE]


def test_reproduce(invoke: Invoke, tmp_path: Path) -> None:
    """A stopped run is gone on with; --fresh begins anew; an INVALID one ends with 3, index and all."""
    settings = [setting for setting in MOCK if setting != "--set"]
    declared = experiment("minicache-finance")
    stopped, resolved, plans = begin(
        tmp_path, experiment_run(declared, profile("laptop"), settings), declared
    )

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(stopped, resolved, plans, Watch(stop))
    stopped.close()
    assert (stopped.status, len(stopped.records())) == ("interrupted", 1)

    arguments = ["reproduce", "minicache-finance", *MOCK, "--runs", str(tmp_path)]
    code, said, errors = invoke(*arguments)
    assert code == 0, errors
    assert f"going on with a stopped run (--fresh begins anew): {stopped.id}" in errors
    assert [run.id for run in list_runs(tmp_path)] == [stopped.id]
    assert len(stopped.records()) == 2
    assert stopped.read()["experiment"]["paper"] == declared.paper
    assert declared.title in said
    index = (tmp_path / "index.html").read_text()
    assert f"{stopped.id}/report/index.html" in index

    stopped.update(status="interrupted")
    fault = ["--set", 'pair.target.script.rules=[{fault="500", times=1}]']
    code, _, errors = invoke(*arguments, "--fresh", *fault)
    assert code == 3
    assert "INVALID" in errors
    assert len(list_runs(tmp_path)) == 2
    assert str(tmp_path / "index.html") in errors
    newest = list_runs(tmp_path)[-1].id
    assert f"{newest}/report/index.html" in (tmp_path / "index.html").read_text()


def test_reproduce_stopped_in_its_second_experiment(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done stays done; the rest is gone on with; when all is done, it is measured anew."""
    arguments = ["reproduce", "minicache-finance", "repeated-requests", *MOCK, "--runs", str(tmp_path)]
    driven: list[str] = []

    def stop_in_the_second(run: Run, *rest: Any) -> None:
        driven.append(run.id)
        if len(driven) == 2:
            run.update(status="interrupted")
            raise KeyboardInterrupt
        drive(run, *rest)

    monkeypatch.setattr("runners.session.drive", stop_in_the_second)
    assert invoke(*arguments)[0] == 130
    first, second = (run.id for run in list_runs(tmp_path))
    assert (tmp_path / "reproduce.json").exists()
    code, _, errors = invoke(*arguments)
    assert code == 0, errors
    assert driven == [first, second, second]
    assert f"done earlier (--fresh begins anew): {first}" in errors
    assert f"going on with a stopped run (--fresh begins anew): {second}" in errors
    index = (tmp_path / "index.html").read_text()
    assert f"{first}/report" in index and f"{second}/report" in index
    assert not (tmp_path / "reproduce.json").exists()

    (tmp_path / "reproduce.json").write_text("{")
    assert invoke(*arguments)[0] == 0
    assert len(list_runs(tmp_path)) == 4
    command = list_runs(tmp_path)[-1].read()["command"]
    assert command.startswith("reusebench reproduce minicache-finance repeated-requests --set")
    assert "pair.target.kind=mock" in command


def test_reproduce_defaults_to_every_experiment(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def note(root: Path, resolved: RunConfig, declared: Any, command: str) -> Any:
        seen.append(declared.id)
        raise KeyboardInterrupt

    monkeypatch.setattr("runners.session.begin", note)
    code, _, _ = invoke("reproduce", "--runs", tmp_path)
    assert (code, seen) == (130, [experiment_names()[0]])


def test_an_unwritable_place_is_an_error_not_a_trace(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("runners.store.Run.create", refuse)
    code, _, errors = invoke("run", "-m", "direct", "-n", 1, "--runs", tmp_path)
    assert (code, "Traceback" in errors) == (1, False)
    assert "No space left on device" in errors


def test_a_broken_plugin_does_not_spoil_the_list(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.registry.METHODS", {"direct": "methods.direct:Direct", "bad": "absent:X"})
    monkeypatch.setattr(
        "bench.registry._KINDS",
        {**__import__("bench.registry").registry._KINDS, "method": {"bad": "absent:X"}},
    )
    code, said, _ = invoke("list", "--json")
    about = {entry["name"]: entry["about"] for entry in read_json(said)["methods"]}
    assert code == 0
    assert "can't be loaded from absent:X" in about["bad"]


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    line = f"{' '.join(COMMAND)} list --runs {tmp_path} | true"
    done = subprocess.run(
        ["bash", "-c", line], env=dict(os.environ), capture_output=True, text=True, timeout=30
    )
    assert "Traceback" not in done.stderr


def test_progress_on_a_terminal() -> None:
    from io import StringIO

    from rich.console import Console

    from bench.display import RunDisplay
    from tests.synthetic import record

    text = StringIO()
    with RunDisplay(Console(file=text, force_terminal=True, width=100), 5) as display:
        display.phase("starting the target engine")
        display.cell("formula+pot", 1, 2)
        display.record(record())
        display.cell("formula+direct", 0, 3)
        for index in range(3):
            display.record(record(index=index, outcome="ok" if index else "infra_error"))
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()).splitlines()
    assert any("the whole run" in line and "5/5" in line and "ETA" in line for line in last)
    assert any("formula+direct" in line and "3/3" in line and "right 2/3" in line for line in last)
    assert any("c #0: infra_error: connection refused" in line for line in last)


def test_a_run_here_and_there_is_one(finished: Run, tmp_path: Path) -> None:
    """The command line adds nothing to what a run measures."""
    from tests.running import essences

    assert essences(run_here(tmp_path, config("direct", "exactcache", repeats=2))) == essences(finished)
    assert PROGRAM in json.dumps(finished.read()["config"]) or "answer = 12.345" in json.dumps(
        finished.read()
    )

"""Runs on mock engines for the tests of the runner and the command line: in this process and in others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.config import RunConfig
from bench.records import Record
from bench.registry import workload
from bench.samples import Sample
from bench.workload import Selection
from runners.session import begin, drive, take_up
from runners.store import Run

PROGRAM = "```python\nanswer = 12.345\n```"


def samples(n: int) -> list[Sample]:
    return workload("formula").load(Selection(n=n))[0]


def asks(sample: Sample) -> str:
    """A pattern that only this sample's prompts match."""
    return re.escape(str(sample.messages[-1]["content"])[-120:].strip())


def several_replies() -> list[dict[str, Any]]:
    """A reply without a program, a program that fails, and for the rest one that runs."""
    _, first, second = samples(3)
    return [
        {"match": asks(first), "reply": "No program comes to mind. Answer: 7.00"},
        {"match": asks(second), "reply": "```python\nanswer = 2 ** 5 + undefined\n```"},
        {"reply": PROGRAM},
    ]


def config(
    *methods: str, n: int = 3, script: dict[str, Any] | None = None, delay_s: float = 0.0, **cell: Any
) -> dict[str, Any]:
    """A run's configuration, as TOML would give it."""
    rules = script or {"rules": several_replies()}
    if delay_s:
        rules = {**rules, "rules": [{**rule, "token_delay_s": delay_s} for rule in rules["rules"]]}
    return {
        "profile": "mock",
        "baseline": methods[0],
        "pair": {
            "target": {"kind": "mock", "script": rules},
            "small": {"kind": "mock", "script": {"default": PROGRAM}},
        },
        "cells": [{"method": one, "workload": "formula", "selection": {"n": n}, **cell} for one in methods],
    }


class Watch:
    """A progress that keeps what it is told and may act on each record."""

    def __init__(self, act: Callable[[int], None] = lambda done: None) -> None:
        self.act = act
        self.records: list[Record] = []
        self.cells: list[tuple[str, int, int]] = []

    def phase(self, text: str) -> None:
        assert text

    def cell(self, cell_id: str, done: int, total: int) -> None:
        self.cells.append((cell_id, done, total))

    def record(self, record: Record) -> None:
        self.records.append(record)
        self.act(len(self.records))


def run_here(root: Path, data: dict[str, Any], watch: Watch | None = None) -> Run:
    """Make and drive a run in this process, without its report."""
    run, resolved, plans = begin(root, RunConfig.model_validate(data), None)
    try:
        drive(run, resolved, plans, watch or Watch())
    finally:
        run.close()
    return run


def resume_here(run: Run, watch: Watch | None = None) -> Run:
    run = Run(run.path)
    try:
        drive(run, *take_up(run), watch or Watch())
    finally:
        run.close()
    return run


def essence(record: Record) -> dict[str, Any]:
    """What must be the same on every run: all but times, the run's id and what depends on engine caches."""
    whole = record.model_dump(mode="json", exclude={"run", "times", "stages", "calls", "usage", "session"})
    whole["stages"] = [stage.name for stage in record.stages]
    kept = ("engine", "purpose", "model", "tokens_in", "tokens_out", "finish_reason", "tries", "error")
    whole["calls"] = [{key: getattr(call, key) for key in kept} for call in record.calls]
    usage = record.usage or {}
    whole["usage"] = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    return whole


def essences(run: Run) -> list[dict[str, Any]]:
    found = [essence(record) for record in run.records()]
    return sorted(found, key=lambda one: (one["cell"], one["repeat"], one["index"], one["attempt"]))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def write_config(path: Path, data: dict[str, Any]) -> Path:
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in data.items()), encoding="utf-8")
    return path


COMMAND = [sys.executable, "-m", "bench.cli"]


def environment(tag: str, **more: str) -> dict[str, str]:
    """An environment by which every descendant of a process is found again."""
    return {**os.environ, "REUSEBENCH_TEST_TAG": tag, "COLUMNS": "100", **more}


def spawn(tag: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(tag),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tagged(tag: str) -> list[int]:
    """Living processes that have ``tag`` in their environment."""
    wanted = f"REUSEBENCH_TEST_TAG={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = 30.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.005)
    return found


def complete_lines(root: Path) -> list[bytes]:
    """The whole lines of the newest run's records."""
    files = sorted(root.glob("*/records.jsonl"))
    return files[-1].read_bytes().split(b"\n")[:-1] if files else []


def services() -> list[int]:
    """The service children of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid() and b"runners.serve" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def kill_services() -> None:
    """Kill them, and wait for the end of each without taking its status from whoever waits for it."""
    for pid in services():
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def change_config(run: Run, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a run's stored configuration: its engine has been cured, say."""
    facts = run.read()
    change(facts["config"])
    run.write(facts)


def names_of(records: Sequence[Record]) -> list[str]:
    return [record.outcome for record in records]

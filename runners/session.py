"""The life of a run: begun, driven to its end or to a stop, taken up again, regraded."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cells import latest
from bench.config import Experiment, RunConfig, config_hash, validate
from bench.errors import ReuseBenchError, UsageError
from bench.records import Record
from bench.registry import workload
from runners.journal import write_atomically
from runners.machine import git_facts, machine_facts, package_versions
from runners.observe import grade_record
from runners.pair import make_engines
from runners.run import CellPlan, Progress, engines_called, execute, plan, resolve
from runners.store import Run, list_runs

__all__ = ["Batch", "Regraded", "begin", "drive", "regrade", "take_up", "unfinished"]


def begin(
    root: Path, config: RunConfig, declared: Experiment | None, command: str | None = None
) -> tuple[Run, RunConfig, list[CellPlan]]:
    """Check and load everything, and only then make the run's folder.

    Args:
        root: Folder of runs.
        config: What to run.
        declared: The experiment that it came from, or None.
        command: The command line that asked for it, for whoever repeats it.

    Raises:
        UsageError, DataMissing: The configuration or a data set is at fault; nothing was made.
    """
    config = resolve(config)
    make_engines(config.pair, engines_called(config.cells))
    plans = plan(config)
    facts = {
        "status": "running",
        "source": "live",
        "experiment": _experiment_facts(config, declared),
        "profile": config.profile,
        "config": _config_facts(config),
        "config_hash": config_hash(config),
        "git": git_facts(),
        "packages": package_versions(),
        "machine": machine_facts(),
        "engines": {"target": None, "small": None},
        "datasets": {item.cell.id: asdict(item.facts) for item in plans},
        "workloads": {item.cell.workload: _workload_facts(item) for item in plans},
        "planned": {item.cell.id: len(item.planned) for item in plans},
        "command": command,
        "seeds": {item.cell.id: item.cell.selection.seed for item in plans},
        "verdict": None,
    }
    return Run.create(root, config.experiment, facts), config, plans


def _experiment_facts(config: RunConfig, declared: Experiment | None) -> dict[str, Any]:
    if declared is None:
        names = " × ".join(dict.fromkeys(cell.workload for cell in config.cells))
        methods = ", ".join(dict.fromkeys(cell.method for cell in config.cells))
        return {
            "id": config.experiment,
            "title": f"{names}: {methods}",
            "paper": None,
            "about": None,
            "baseline": config.baseline,
        }
    return declared.model_dump(mode="json", exclude={"workloads", "methods", "selection"})


def _config_facts(config: RunConfig) -> dict[str, Any]:
    dump = config.model_dump(mode="json")
    dump["cells"] = [{"id": cell.id, **cell.model_dump(mode="json")} for cell in config.cells]
    return dump


def _workload_facts(item: CellPlan) -> dict[str, Any]:
    # Grading the empty reply costs nothing and names every score that the workload records.
    scores = list(item.workload.grade(item.samples[0], "").scores)
    return {"version": item.workload.version, "primary_score": item.workload.primary_score, "scores": scores}


def take_up(run: Run) -> tuple[RunConfig, list[CellPlan]]:
    """Lock a run and load what it was made of.

    Raises:
        RunLocked: It is being written.
        UsageError: Its data or its workload is no longer what it was.
    """
    run.lock()
    facts = run.read()
    config, plans = _reload(run, facts)
    for item in plans:
        version = facts["workloads"][item.cell.workload]["version"]
        if version != item.workload.version:
            raise UsageError(
                f"{item.cell.workload} is now version {item.workload.version}, and the run began with "
                f"{version}; their numbers don't mix. Begin a new run."
            )
    return config, plans


def _reload(run: Run, facts: dict[str, Any]) -> tuple[RunConfig, list[CellPlan]]:
    """Return a run's configuration with the very samples that it began with."""
    data = facts["config"]
    cells = [{key: value for key, value in cell.items() if key != "id"} for cell in data["cells"]]
    config = validate(RunConfig, {**data, "cells": cells}, f"{run.path}/run.json")
    plans = plan(config)
    for item in plans:
        before, now = facts["datasets"][item.cell.id]["sha256"], item.facts.sha256
        if before != now:
            raise UsageError(
                f"{item.cell.id}: the data is no longer what the run began with (SHA-256 {before[:12]}…, now "
                f"{now[:12]}…). Restore it, or begin a new run."
            )
    return config, plans


def drive(run: Run, config: RunConfig, plans: list[CellPlan], progress: Progress) -> None:
    """Run what is left of a locked run, and write down how that ended.

    SIGINT and SIGTERM stop it in order: engines and services end, every finished record is kept.

    Raises:
        KeyboardInterrupt: It was stopped.
        ReuseBenchError: It can't go on.
    """
    facts = run.read()
    facts.pop("failure", None)
    run.write({**facts, "status": "running"})
    try:
        asyncio.run(_until_stopped(run, config, plans, progress))
    except (KeyboardInterrupt, asyncio.CancelledError):
        run.update(status="interrupted")
        raise KeyboardInterrupt from None
    except Exception as error:  # a bug too must not leave a run that seems to go on
        with suppress(OSError):  # the disk may be what failed
            run.update(status="failed", failure={"type": type(error).__name__, "message": str(error)})
        raise
    run.update(status="complete")


async def _until_stopped(run: Run, config: RunConfig, plans: list[CellPlan], progress: Progress) -> None:
    task = asyncio.current_task()
    assert task is not None
    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await execute(run, config, plans, progress)


def _identity(config: RunConfig) -> str:
    """Return the hash that a run of ``config`` has in its ``run.json``."""
    return config_hash(resolve(config))


def unfinished(root: Path, config: RunConfig) -> Run | None:
    """Return the newest run of exactly this configuration if it can be gone on with, or None.

    That is one that was stopped, or whose last attempt at some request failed.
    """
    wanted = _identity(config)
    for run in reversed(list_runs(root)):
        try:
            if run.read().get("config_hash") == wanted:
                return run if _can_go_on(run) else None
        except ReuseBenchError:  # damaged, or of another version: not one to go on with
            continue
    return None


class Batch:
    """The runs of one ``reproduce``, so that one that was stopped goes on where it was.

    Kept in ``reproduce.json`` beside the runs until all are complete and VALID.
    """

    def __init__(self, root: Path, configs: Sequence[RunConfig], *, fresh: bool) -> None:
        self._root = root
        self._path = root / "reproduce.json"
        self._batch = [_identity(config) for config in configs]
        self._runs: dict[str, str] = {} if fresh else self._read()
        self._fresh = fresh

    def _read(self) -> dict[str, str]:
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["batch"] != self._batch:
                return {}
            return {key: run for key, run in kept["runs"].items() if isinstance(run, str)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or damaged: begin anew
            return {}

    def find(self, config: RunConfig) -> tuple[Run | None, bool]:
        """Return this configuration's run, if there is one to use, and whether it is done."""
        name = self._runs.get(_identity(config))
        if name is not None:
            run = Run(self._root / name)
            with suppress(ReuseBenchError):  # deleted or damaged: begin anew
                if _can_go_on(run):
                    return run, False
                ruling = run.read().get("verdict")
                if ruling is None or ruling["valid"]:  # None: stopped before its report
                    return run, True
        return (None if self._fresh else unfinished(self._root, config)), False

    def note(self, config: RunConfig, run: Run) -> None:
        """Remember that ``run`` is this configuration's."""
        self._runs[_identity(config)] = run.id
        kept = {"batch": self._batch, "runs": self._runs}
        write_atomically(self._path, json.dumps(kept, indent=1) + "\n")

    def finish(self) -> None:
        """Forget the batch: the next ``reproduce`` measures anew."""
        self._path.unlink(missing_ok=True)


def _can_go_on(run: Run) -> bool:
    """Whether something of an undamaged run is left to do, or failed."""
    failed = any(not record.completed for record in latest(run.records()))
    return failed or run.read().get("status") != "complete"


@dataclass(frozen=True, slots=True)
class Regraded:
    """What regrading changed.

    Attributes:
        graded: How many records carry a grade.
        changed: Records whose scores or extracted answer differ, as (before, after).
    """

    graded: int
    changed: list[tuple[Record, Record]]


def regrade(run: Run, *, write: bool) -> Regraded:
    """Grade every complete reply of a run again, without inference.

    Args:
        run: Any run.
        write: Replace the records (atomically) where grades changed.

    Raises:
        RunLocked: It is being written.
        UsageError: Its data is no longer what it was.
    """
    if write:
        run.lock()
    facts = run.read()
    config, plans = _reload(run, facts)
    samples = {
        (item.cell.id, sample.id): (item.workload, sample) for item in plans for sample in item.samples
    }
    changed: list[tuple[Record, Record]] = []
    result: list[Record] = []
    for record in run.records():
        after = record
        if record.grade is not None and record.reply is not None:
            if (record.cell, record.sample) not in samples:
                raise UsageError(f"The data no longer has sample {record.sample}; restore it to regrade.")
            grade = grade_record(*samples[record.cell, record.sample], record.reply)
            outcome = "ok" if grade.parsed else "unparsed"
            after = record.model_copy(update={"grade": grade, "outcome": outcome})
            if (after.grade, after.outcome) != (record.grade, record.outcome):
                changed.append((record, after))
        result.append(after)
    if write and changed:
        run.replace_records(result)
        names = {cell.workload for cell in config.cells}
        versions = {**facts["workloads"]}
        for name in names:
            versions[name] = {**versions[name], "version": workload(name).version}
        run.update(workloads=versions)
    return Regraded(sum(record.grade is not None for record in result), changed)

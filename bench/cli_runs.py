"""The commands on runs: make, take up, regrade, look at, report, reproduce."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from bench.cli_options import (
    RUNS,
    SETTINGS,
    JsonOption,
    ProfileOption,
    RunArgument,
    RunsOption,
    SetOption,
    command_line,
    err,
    examples,
    out,
    print_json,
    profile_with,
)
from bench.config import RunConfig, apply_overrides, read_toml, validate
from bench.errors import InvalidRun, ReuseBenchError, UsageError, did_you_mean
from bench.plans import experiment, experiment_names, experiment_run, profile
from bench.registry import names

if TYPE_CHECKING:
    from bench.config import Experiment
    from runners.run import CellPlan
    from runners.store import Run

__all__ = ["app"]

app = typer.Typer(**SETTINGS)


@app.command(
    epilog=examples(
        "reusebench run --method pot --method direct --workload formula -n 50",
        "reusebench run --method pot --workload formula --path formula_test.jsonl -n 50 --seed 1",
        "reusebench run --method direct --engine http://localhost:8000/v1 --model my-model",
        "reusebench run --config my-run.toml --set pair.target.threads=4",
    )
)
def run(
    ctx: typer.Context,
    methods: Annotated[list[str] | None, typer.Option("--method", "-m", help="May be repeated.")] = None,
    workload: Annotated[str, typer.Option("--workload", "-w")] = "formula",
    path: Annotated[str | None, typer.Option(help="Local file of the workload's real data.")] = None,
    source: Annotated[str | None, typer.Option(help="builtin, path or hub. Default: builtin.")] = None,
    split: Annotated[str, typer.Option(help="Split of the real data.")] = "test",
    n: Annotated[int | None, typer.Option("-n", min=1, help="Samples. Default: the workload's.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Draw them from this many groups.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds the choice of samples.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over the samples.")] = 1,
    baseline: Annotated[str | None, typer.Option(help="Method to compare with. Default: the first.")] = None,
    engine: Annotated[str | None, typer.Option(help="Target engine: a base URL that ends in /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name to send to that URL.")] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="TOML file with the whole run.")
    ] = None,
    profile_name: ProfileOption = "laptop",
    settings: SetOption = None,
    runs: RunsOption = RUNS,
) -> None:
    """Run methods on a workload and report."""
    if config_file is not None:
        _refuse_beside_config(ctx)
        data = {"profile": str(config_file), **read_toml(config_file)}
        if "pair" not in data:
            data["pair"] = profile(profile_name).pair.model_dump(mode="json")
        config = validate(RunConfig, apply_overrides(data, settings or []), str(config_file))
    else:
        if not methods:
            raise UsageError(f"Name at least one --method. Known: {', '.join(names('method'))}.")
        chosen = profile_with(profile_name, engine, model)
        given = {"source": source, "path": path, "split": split, "n": n, "groups": groups, "seed": seed}
        selection = {key: value for key, value in given.items() if value is not None}
        cells = [
            {"method": one, "workload": workload, "selection": selection, "repeats": repeats}
            for one in methods
        ]
        data = {
            "profile": chosen.name,
            "pair": chosen.pair.model_dump(mode="json"),
            "cells": cells,
            "baseline": baseline or methods[0],
        }
        config = validate(RunConfig, apply_overrides(data, settings or []), "run")
    from runners.session import begin

    _drive(*begin(runs, config, None, command_line()))


def _refuse_beside_config(ctx: typer.Context) -> None:
    """An option that the file decides would be ignored in silence."""
    for option in ctx.command.params:
        name = option.name or ""
        source = ctx.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and name not in ("config_file", "profile_name", "settings", "runs"):
            raise UsageError(
                f"--config holds the whole run; change it with --set instead of {option.opts[0]}."
            )


def _drive(one: Run, config: RunConfig, plans: list[CellPlan]) -> None:
    """Drive a run to its end and report it; an INVALID one raises."""
    from bench.display import RunDisplay
    from runners.session import drive

    err.print(f"run {one.id}", markup=False)
    try:
        with RunDisplay(err, sum(len(item.planned) for item in plans)) as display:
            drive(one, config, plans, display)
    except KeyboardInterrupt:
        err.print(
            f"Stopped; nothing recorded is lost. Go on with: {one.resume_command}",
            markup=False,
            soft_wrap=True,
        )
        raise
    except ReuseBenchError:
        with suppress(OSError):  # the disk may be what failed
            if one.records():
                _report(one)
        raise
    else:
        facts = _report(one)
    finally:
        one.close()
    _check_valid(facts)


def _report(one: Run, *, quiet: bool = False) -> dict[str, Any]:
    """Write the verdict and the report, print the table, and return the run's facts."""
    from reports.page import write_report
    from reports.summary import summarize
    from reports.tables import show as table_of
    from reports.verdict import verdict

    records = one.records()
    facts = one.read()
    facts["verdict"] = verdict(facts, records)
    if not one.written_elsewhere:  # else run.json is another's to write, and this a look at what is there
        one.write(facts)
    background = one.background()
    write_report(one.path, facts, records, background)
    if quiet:
        return facts
    out.print(table_of(summarize(facts, records, background)))
    err.print(f"report: {one.path / 'report' / 'index.html'}", markup=False, soft_wrap=True)
    return facts


def _check_valid(facts: dict[str, Any]) -> None:
    if not facts["verdict"]["valid"]:
        reasons = "".join(f"\n- {one['problem']} {one['remedy']}" for one in facts["verdict"]["reasons"])
        raise InvalidRun(f"The run is INVALID; its numbers must not be used.{reasons}")


@app.command(epilog=examples("reusebench resume latest"))
def resume(name: RunArgument, runs: RunsOption = RUNS) -> None:
    """Go on with a run that was stopped: only requests without a good record are made."""
    from runners.session import take_up
    from runners.store import find_run

    one = find_run(runs, name)
    _drive(one, *take_up(one))


@app.command(epilog=examples("reusebench score latest", "reusebench score latest --write --json"))
def score(
    name: RunArgument,
    write: Annotated[
        bool, typer.Option("--write", help="Store the new grades and render the report anew.")
    ] = False,
    as_json: JsonOption = False,
    runs: RunsOption = RUNS,
) -> None:
    """Grade a run's replies again, without inference, and say what changed."""
    from runners.session import regrade
    from runners.store import find_run

    one = find_run(runs, name)
    result = regrade(one, write=write)
    changes = [
        {
            "cell": before.cell,
            "sample": before.sample,
            "before": before.grade.model_dump() if before.grade else None,
            "after": after.grade.model_dump() if after.grade else None,
        }
        for before, after in result.changed
    ]
    if as_json:
        print_json({"run": one.id, "graded": result.graded, "changed": changes, "written": write})
    else:
        for change in changes:
            out.print(
                f"{change['cell']} {change['sample']}: {change['before']} → {change['after']}", markup=False
            )
        kept = "" if write or not changes else "; --write stores them"
        out.print(f"{result.graded} graded, {len(changes)} changed{kept}", markup=False)
    if write and changes:
        _report(one, quiet=as_json)
    one.close()


@app.command(
    epilog=examples(
        "reusebench show latest",
        "reusebench show latest --json",
        "reusebench show latest --sample builtin-test-0-quick-ratio-000003 --cell formula+minicache",
    )
)
def show(
    name: RunArgument,
    sample: Annotated[
        str | None, typer.Option(help="Tell what happened to this sample, cell by cell.")
    ] = None,
    cell: Annotated[str | None, typer.Option(help="Only in this cell (with --sample).")] = None,
    as_json: JsonOption = False,
    runs: RunsOption = RUNS,
) -> None:
    """Print a run's main table and verdict, or the story of one request."""
    if sample is not None:
        _tell(name, sample, cell, as_json, runs)
        return
    if cell is not None:
        raise UsageError("--cell goes with --sample.")
    from reports.summary import summarize
    from reports.tables import show as table_of
    from runners.store import find_run

    one = find_run(runs, name)
    facts = one.read()
    summary = summarize(facts, one.records(), one.background())
    if as_json:
        from dataclasses import asdict

        rows = [
            {
                "cell": row.cell,
                "method": row.method,
                "workload": row.workload,
                "n": row.n,
                "values": row.values,
                "intervals": {key: asdict(value) if value else None for key, value in row.intervals.items()},
                "outcomes": row.outcomes,
                "unranked": row.unranked or None,
            }
            for row in summary.rows
        ]
        ruling = {"valid": summary.valid, "reasons": list(summary.reasons)}
        print_json(
            {
                "run": one.id,
                "status": facts["status"],
                "source": summary.source,
                "verdict": ruling,
                "cells": rows,
            }
        )
        return
    out.print(table_of(summary))
    for reason in summary.reasons:
        out.print(f"INVALID: {reason['problem']} {reason['remedy']}", markup=False, soft_wrap=True)


def _tell(name: str, sample: str, cell: str | None, as_json: bool, runs: Path) -> None:
    """Print what happened to one sample."""
    from bench.cells import latest
    from reports.story import set_off, story
    from runners.store import find_run

    one = find_run(runs, name)
    records = latest(one.records())
    cells = list(dict.fromkeys(record.cell for record in records))
    if cell is not None and cell not in cells:
        raise UsageError(f'{one.id} has no cell "{cell}".{did_you_mean(cell, cells)}')
    found = [r for r in records if r.sample == sample and cell in (None, r.cell)]
    if not found:
        known = sorted({record.sample for record in records})
        raise UsageError(f'{one.id} has no record of sample "{sample}".{did_you_mean(sample, known)}')
    background = one.background()
    if as_json:
        print_json(
            [
                {
                    **record.model_dump(mode="json"),
                    "background": [work.model_dump(mode="json") for work in set_off(record, background)],
                }
                for record in found
            ]
        )
        return
    for record in found:
        out.print(story(record, set_off(record, background)), markup=False, soft_wrap=True, highlight=False)


@app.command(epilog=examples("reusebench report latest"))
def report(name: RunArgument, runs: RunsOption = RUNS) -> None:
    """Render a run's report anew: HTML page, Markdown, CSV, LaTeX, plots."""
    from runners.store import find_run

    _report(find_run(runs, name))


@app.command(
    epilog=examples(
        "reusebench reproduce",
        "reusebench reproduce minicache-finance --profile laptop -n 320 --groups 16 --twins 64",
        "reusebench reproduce --fresh",
    )
)
def reproduce(
    wanted: Annotated[list[str] | None, typer.Argument(metavar="[EXPERIMENT]…", help="Default: all.")] = None,
    profile_name: ProfileOption = "laptop",
    n: Annotated[int | None, typer.Option("-n", min=1, help="Samples per cell, over the profile's.")] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Groups that they are drawn from, over the profile's.")
    ] = None,
    twins: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of each +specdec cell, from the first on, over the profile's."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew instead of going on with a stopped run.")
    ] = False,
    settings: SetOption = None,
    runs: RunsOption = RUNS,
) -> None:
    """Run the experiments of the papers and report ours beside theirs.

    Stopped, it goes on where it was when it is typed again; complete and VALID, it measures anew.
    """
    from reports.page import write_index
    from runners.session import Batch, begin, take_up

    chosen: list[tuple[Experiment, RunConfig]] = [
        (declared, experiment_run(declared, profile(profile_name), settings or [], n, groups, twins))
        for declared in map(experiment, wanted or experiment_names())
    ]
    batch = Batch(runs, [config for _, config in chosen], fresh=fresh)
    done: list[Run] = []
    invalid: InvalidRun | None = None
    for declared, config in chosen:
        out.rule(escape(declared.title))
        found, complete = batch.find(config)
        try:
            if found is None:
                one, resolved, plans = begin(runs, config, declared, command_line())
                done.append(one)
                batch.note(config, one)
                _drive(one, resolved, plans)
                continue
            done.append(found)
            if complete:
                err.print(f"done earlier (--fresh begins anew): {found.id}", markup=False)
                _check_valid(_report(found))
                continue
            err.print(f"going on with a stopped run (--fresh begins anew): {found.id}", markup=False)
            batch.note(config, found)
            _drive(found, *take_up(found))
        except InvalidRun as error:
            invalid = error
            err.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
    page = write_index(runs, [(one.path, one.read(), one.records(), one.background()) for one in done])
    err.print(f"all results: {page}", markup=False, soft_wrap=True)
    if invalid is not None:
        raise invalid
    batch.finish()

"""The command line. Every other package is imported only by the command that needs it."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import bench
from bench.config import Profile, RunConfig, apply_overrides, read_toml, validate
from bench.errors import InvalidRun, ReuseBenchError, UsageError, did_you_mean
from bench.plans import experiment, experiment_names, experiment_run, profile, profile_names
from bench.registry import names

if TYPE_CHECKING:
    from bench.config import Experiment
    from runners.run import CellPlan
    from runners.store import Run

__all__ = ["app", "main"]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class _Commands(typer.core.TyperGroup):
    """A command group that says what an unknown command may have meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UsageError(
                f'There is no command "{args[0]}".{did_you_mean(args[0], self.list_commands(ctx))}'
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "cls": _Commands,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    help="Benchmark and evaluation suite for reuse in LLM inference.",
    epilog="Exit codes: 0 ok, 1 a check failed, 2 usage, 3 invalid run, 4 model, engine or data missing, "
    "130 interrupted.",
    **_SETTINGS,
)
models_app = typer.Typer(help="Fetch, list and verify the embedded models.", **_SETTINGS)
app.add_typer(models_app, name="models")


def _examples(*lines: str) -> str:
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  $ {escape(line)}" for line in lines)


RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of runs.", envvar="REUSEBENCH_RUNS")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help='Run id, a part of it, its folder, or "latest".')
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="Which engines; see `reusebench list`.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting by its dotted key; may be repeated."),
]
RUNS = Path("runs")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


@app.command("list", epilog=_examples("reusebench list", "reusebench list --json"))
def list_(as_json: JsonOption = False, runs: RunsOption = RUNS) -> None:
    """List methods, workloads, experiments, profiles, engines and runs."""
    from runners.store import list_runs

    known: dict[str, list[dict[str, Any]]] = {
        "methods": [{"name": name, "about": _about("method", name)} for name in names("method")],
        "workloads": [{"name": name, "about": _about("workload", name)} for name in names("workload")],
        "experiments": [
            {"name": name, "about": f"{experiment(name).title} ({experiment(name).paper or 'ours'})"}
            for name in experiment_names()
        ],
        "profiles": [{"name": name, "about": profile(name).description} for name in profile_names()],
        "engines": [{"name": name, "about": _about("engine", name)} for name in names("engine")],
        "runs": [
            {"name": run.id, "about": f"{facts['status']}{_judged(facts)}"}
            for run in list_runs(runs)
            for facts in [run.read()]
        ],
    }
    if as_json:
        _print_json(known)
        return
    for kind, entries in known.items():
        table = Table("name", "about", title=kind, title_justify="left", box=None, pad_edge=False)
        for entry in entries:
            table.add_row(escape(entry["name"]), escape(entry["about"]))
        if entries:
            out.print(table, "")


def _about(kind: str, name: str) -> str:
    from bench import registry

    if kind == "workload":
        thing: Any = type(registry.workload(name))
    elif kind == "engine":
        thing = registry.engine_class(name)
    else:
        spec = registry.variant(name)
        if spec.method != name:
            return f"{spec.method} with " + ", ".join(
                f"{key} = {value}" for key, value in spec.config.items()
            )
        thing = registry.method_class(name)
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _judged(facts: dict[str, Any]) -> str:
    ruling = facts.get("verdict")
    return "" if ruling is None else ", VALID" if ruling["valid"] else ", INVALID"


@app.command(epilog=_examples("reusebench doctor", "reusebench doctor --no-engines --json"))
def doctor(
    profile_name: ProfileOption = "laptop",
    engines: Annotated[bool, typer.Option(help="Also start each engine and ask it for a word.")] = True,
    as_json: JsonOption = False,
    runs: RunsOption = RUNS,
) -> None:
    """Check models, engines, disk, ports, data and isolation, and say the cure of what is wrong."""
    import asyncio
    from dataclasses import asdict

    from runners.doctor import Check, examine

    async def look() -> list[Check]:
        found = []
        async for check in examine(profile(profile_name), runs, engines=engines):
            found.append(check)
            if not as_json:
                mark = "[green]ok  [/]" if check.ok else "[red]FAIL[/]" if check.needed else "[yellow]note[/]"
                out.print(f"{mark} {escape(check.name)}: {escape(check.detail)}", soft_wrap=True)
                if check.cure:
                    out.print(f"     cure: {escape(check.cure)}", soft_wrap=True)
        return found

    checks = asyncio.run(look())
    if as_json:
        _print_json([asdict(check) for check in checks])
    if not all(check.ok for check in checks if check.needed):
        raise typer.Exit(1)


@models_app.command("list", epilog=_examples("reusebench models list"))
def models_list(as_json: JsonOption = False) -> None:
    """List the pinned models and what the store has of them."""
    from runners.models import catalogue, status

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "state": now.state,
            "bytes": model.bytes,
            "sha256": model.sha256,
            "licence": model.license,
            "path": str(now.path),
        }
        for name, model in catalogue().items()
        for now in [status(name)]
    ]
    if as_json:
        _print_json(rows)
        return
    table = Table("name", "state", "MB", "SHA-256", "licence", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["name"], row["state"], f"{row['bytes'] / 1e6:,.0f}", row["sha256"][:12] + "…", row["licence"]
        )
    out.print(table)


@models_app.command(
    "pull",
    epilog=_examples(
        "reusebench models pull",
        "reusebench models pull --source index",
        "REUSEBENCH_MODELS=~/gguf reusebench models pull",
    ),
)
def models_pull(
    wanted: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="Default: every model.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Try only this source (local, hub, index); may be repeated, in order."),
    ] = None,
) -> None:
    """Fetch models, checked by SHA-256. A stopped pull goes on where it stopped."""
    from bench.display import PullDisplay
    from runners.models import catalogue, model_file, pull

    chosen = wanted or list(catalogue())
    for name in chosen:
        model_file(name)
    with PullDisplay(err) as display:
        for name in chosen:
            path = pull(name, display, source) if source else pull(name, display)
            display.say(f"{name}: ready at {path}")


@models_app.command("verify", epilog=_examples("reusebench models verify"))
def models_verify(
    wanted: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="Default: every model.")
    ] = None,
) -> None:
    """Hash the stored models and compare with the pins."""
    from bench.display import PullDisplay
    from runners.models import catalogue, verify

    with PullDisplay(err) as display:
        for name in wanted or list(catalogue()):
            display.say(f"{name}: {verify(name, display)} is as pinned")


@app.command(
    epilog=_examples(
        "reusebench serve exactcache",
        "reusebench serve pot --workload formula --state cache.jsonl --port 8080",
        "reusebench serve exactcache --engine http://localhost:8000/v1 --model my-model",
    )
)
def serve(
    method: Annotated[str, typer.Argument(help="Method to serve; see `reusebench list`.")],
    engine: Annotated[
        str | None, typer.Option(help="Target engine: a base URL that ends in /v1. Default: the profile's.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name to send to that URL.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="Workload whose answer format and miss path to use. Default: plain chat."),
    ] = None,
    state: Annotated[Path | None, typer.Option(help="File that keeps the cache over restarts.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key that clients must send.")
    ] = None,
    profile_name: ProfileOption = "laptop",
    settings: SetOption = None,
) -> None:
    """Serve a method behind the OpenAI API, in front of a real model.

    --set changes the method's own settings (max_entries=1000) and, under pair., the engines.
    """
    from runners.deploy import deploy

    key = _key(api_key_env)
    pair = _profile(profile_name, engine, model, [s for s in settings or [] if s.startswith("pair.")]).pair
    own = apply_overrides({}, [s for s in settings or [] if not s.startswith("pair.")])
    deploy(method, own, pair, workload, state, host, port, key, lambda text: err.print(text, markup=False))


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageError(f"--api-key-env {variable}: that variable is not set.")
    return key


def _profile(name: str, url: str | None, model: str | None, settings: Sequence[str] = ()) -> Profile:
    """Return a profile with its target engine replaced where a URL is given."""
    data = profile(name).model_dump(mode="json")
    if url is not None:
        data["name"] = "url"
        data["pair"]["target"] = {"kind": "openai", "url": url, "model": model}
    elif model is not None:
        data["pair"]["target"]["model"] = model
    return validate(Profile, apply_overrides(data, settings), "--set" if settings else f"profile {name}")


@app.command(
    epilog=_examples(
        "reusebench run --method pot --method direct --workload formula -n 50",
        "reusebench run --method pot --workload formula --path formula_test.jsonl -n 50 --seed 1",
        "reusebench run --method direct --engine http://localhost:8000/v1 --model my-model",
        "reusebench run --config my-run.toml --set pair.target.threads=4",
    )
)
def run(
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
        if methods:
            raise UsageError("--config holds the whole run; change it with --set instead of --method.")
        data = {"profile": str(config_file), **read_toml(config_file)}
        if "pair" not in data:
            data["pair"] = profile(profile_name).pair.model_dump(mode="json")
        config = validate(RunConfig, apply_overrides(data, settings or []), str(config_file))
    else:
        if not methods:
            raise UsageError(f"Name at least one --method. Known: {', '.join(names('method'))}.")
        chosen = _profile(profile_name, engine, model)
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
    if config.baseline is not None and config.baseline not in {cell.method for cell in config.cells}:
        known = [cell.method for cell in config.cells]
        raise UsageError(
            f"--baseline {config.baseline} is not among the methods.{did_you_mean(config.baseline, known)}"
        )
    from runners.session import begin

    _drive(*begin(runs, config, None))


def _drive(one: Run, config: RunConfig, plans: list[CellPlan]) -> dict[str, Any]:
    """Drive a run to its end, report it, and return its facts; an INVALID one raises."""
    from bench.display import RunDisplay
    from runners.session import drive

    err.print(f"run {one.id}", markup=False)
    try:
        with RunDisplay(err) as display:
            drive(one, config, plans, display)
    except KeyboardInterrupt:
        err.print(
            f"\nStopped; nothing recorded is lost. Go on with: reusebench resume {one.id}", markup=False
        )
        raise
    finally:
        facts = _report(one)
        one.close()
    _check_valid(facts)
    return facts


def _report(one: Run) -> dict[str, Any]:
    """Write the verdict and the report, print the table, and return the run's facts."""
    from reports.page import write_report
    from reports.summary import summarize
    from reports.tables import show as table_of
    from reports.verdict import verdict

    records = one.records()
    facts = one.update(verdict=verdict(one.read(), records))
    write_report(one.path, facts, records)
    out.print(table_of(summarize(facts, records)))
    err.print(f"report: {one.path / 'report' / 'index.html'}", markup=False, soft_wrap=True)
    return facts


def _check_valid(facts: dict[str, Any]) -> None:
    if not facts["verdict"]["valid"]:
        reasons = "".join(f"\n- {one['problem']} {one['remedy']}" for one in facts["verdict"]["reasons"])
        raise InvalidRun(f"The run is INVALID; its numbers must not be used.{reasons}")


@app.command(epilog=_examples("reusebench resume latest"))
def resume(name: RunArgument, runs: RunsOption = RUNS) -> None:
    """Go on with a run that was stopped: only requests without a good record are made."""
    from runners.session import take_up
    from runners.store import find_run

    one = find_run(runs, name)
    _drive(one, *take_up(one))


@app.command(epilog=_examples("reusebench score latest", "reusebench score latest --write --json"))
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
        _print_json({"run": one.id, "graded": result.graded, "changed": changes, "written": write})
    else:
        for change in changes:
            out.print(
                f"{change['cell']} {change['sample']}: {change['before']} → {change['after']}", markup=False
            )
        kept = "" if write or not changes else "; --write stores them"
        out.print(f"{result.graded} graded, {len(changes)} changed{kept}", markup=False)
    if write and changes and not as_json:
        _report(one)
    one.close()


@app.command(epilog=_examples("reusebench show latest", "reusebench show latest --json"))
def show(name: RunArgument, as_json: JsonOption = False, runs: RunsOption = RUNS) -> None:
    """Print a run's main table and verdict."""
    from reports.summary import summarize
    from reports.tables import show as table_of
    from runners.store import find_run

    one = find_run(runs, name)
    facts = one.read()
    summary = summarize(facts, one.records())
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
        _print_json(
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


@app.command(epilog=_examples("reusebench report latest"))
def report(name: RunArgument, runs: RunsOption = RUNS) -> None:
    """Render a run's report anew: HTML page, Markdown, CSV, LaTeX, plots."""
    from runners.store import find_run

    _report(find_run(runs, name))


@app.command(
    epilog=_examples(
        "reusebench reproduce",
        "reusebench reproduce minicache-finance --profile laptop -n 100",
        "reusebench reproduce --fresh",
    )
)
def reproduce(
    wanted: Annotated[list[str] | None, typer.Argument(metavar="[EXPERIMENT]…", help="Default: all.")] = None,
    profile_name: ProfileOption = "laptop",
    n: Annotated[int | None, typer.Option("-n", min=1, help="Samples per cell, over the profile's.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew instead of going on with a stopped run.")
    ] = False,
    settings: SetOption = None,
    runs: RunsOption = RUNS,
) -> None:
    """Run the experiments of the papers and report ours beside theirs.

    A run of the same experiment and settings that was stopped is gone on with.
    """
    from reports.page import write_index
    from runners.session import begin, take_up, unfinished

    chosen: list[tuple[Experiment, RunConfig]] = [
        (declared, experiment_run(declared, profile(profile_name), settings or [], n))
        for declared in map(experiment, wanted or experiment_names())
    ]
    done: list[Run] = []
    invalid: InvalidRun | None = None
    for declared, config in chosen:
        out.rule(escape(declared.title))
        one = None if fresh else unfinished(runs, config)
        try:
            if one is not None:
                err.print(f"going on with a stopped run (--fresh begins anew): {one.id}", markup=False)
                done.append(one)
                _drive(one, *take_up(one))
            else:
                one, resolved, plans = begin(runs, config, declared)
                done.append(one)
                _drive(one, resolved, plans)
        except InvalidRun as error:
            invalid = error
            err.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
    page = write_index(runs, [(one.path, one.read(), one.records()) for one in done])
    err.print(f"all results: {page}", markup=False, soft_wrap=True)
    if invalid is not None:
        raise invalid


def _version(value: bool) -> None:
    if value:
        out.print(f"reusebench {bench.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Benchmark and evaluation suite for reuse in LLM inference."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    warnings.showwarning = lambda message, *_, **__: err.print(
        f"warning: {message}", markup=False, soft_wrap=True
    )
    try:
        app(args=list(arguments) if arguments is not None else None)
    except ReuseBenchError as error:
        err.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()

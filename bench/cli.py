"""The command line. Every other package is imported only by the command that needs it."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

import bench
from bench import cli_models, cli_runs
from bench.cli_options import (
    RUNS,
    SETTINGS,
    JsonOption,
    ProfileOption,
    RunsOption,
    SetOption,
    err,
    examples,
    note_arguments,
    out,
    print_json,
    profile_with,
)
from bench.config import apply_overrides
from bench.errors import ReuseBenchError, UsageError
from bench.plans import experiment, experiment_names, profile, profile_names
from bench.registry import names

__all__ = ["app", "main"]

app = typer.Typer(
    help="Benchmark and evaluation suite for reuse in LLM inference.",
    epilog=examples("reusebench doctor", "reusebench run -m pot -m direct -n 50", "reusebench show latest")
    + "\n\nExit codes: 0 ok, 1 a check failed, 2 usage, 3 invalid run, 4 model, engine or data missing, "
    "130 interrupted.",
    **SETTINGS,
)
app.add_typer(cli_runs.app)
app.add_typer(cli_models.app, name="models")


@app.command("list", epilog=examples("reusebench list", "reusebench list --json"))
def list_(as_json: JsonOption = False, runs: RunsOption = RUNS) -> None:
    """List methods, workloads, experiments, profiles, engines and runs."""
    from runners.store import Run, list_runs

    def about_run(run: Run) -> str:
        try:
            return f"{run.status}{_judged(run.read())}"
        except ReuseBenchError as error:
            return str(error)

    known: dict[str, list[dict[str, Any]]] = {
        "methods": [{"name": name, "about": _about("method", name)} for name in names("method")],
        "workloads": [{"name": name, "about": _about("workload", name)} for name in names("workload")],
        "experiments": [
            {"name": name, "about": f"{experiment(name).title} ({experiment(name).paper or 'ours'})"}
            for name in experiment_names()
        ],
        "profiles": [{"name": name, "about": profile(name).description} for name in profile_names()],
        "engines": [{"name": name, "about": _about("engine", name)} for name in names("engine")],
        "runs": [{"name": run.id, "about": about_run(run)} for run in list_runs(runs)],
    }
    if as_json:
        print_json(known)
        return
    for kind, entries in known.items():
        table = Table("name", "about", title=kind, title_justify="left", box=None, pad_edge=False)
        for entry in entries:
            table.add_row(escape(entry["name"]), escape(entry["about"]))
        if entries:
            out.print(table, "")


def _about(kind: str, name: str) -> str:
    from bench import registry

    try:
        return _summary(registry, kind, name)
    except UsageError as error:  # a broken plugin: the others are still worth listing
        return str(error)


def _summary(registry: Any, kind: str, name: str) -> str:
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
    line = (thing.__doc__ or "").strip().partition("\n")[0]
    return re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", line)


def _judged(facts: dict[str, Any]) -> str:
    ruling = facts.get("verdict")
    return "" if ruling is None else ", VALID" if ruling["valid"] else ", INVALID"


@app.command(epilog=examples("reusebench doctor", "reusebench doctor --no-engines --json"))
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
        print_json([asdict(check) for check in checks])
    if not all(check.ok for check in checks if check.needed):
        raise typer.Exit(1)


@app.command(
    epilog=examples(
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
    of_pair = [setting for setting in settings or [] if setting.startswith("pair.")]
    pair = profile_with(profile_name, engine, model, of_pair).pair
    own = apply_overrides({}, [setting for setting in settings or [] if setting not in of_pair])
    deploy(method, own, pair, workload, state, host, port, key, lambda text: err.print(text, markup=False))


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageError(f"--api-key-env {variable}: that variable is not set.")
    return key


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
    given = list(sys.argv[1:] if arguments is None else arguments)
    note_arguments(given)
    try:
        app(args=given)
    except ReuseBenchError as error:
        err.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that may not be written to: not ours to trace
        err.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()

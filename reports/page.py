"""A run's report as one offline HTML page with its tables and figures, and an index over several runs."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from bench.records import BackgroundRecord, Record
from reports.details import cell_details, command, definitions, environment, examples
from reports.findings import findings
from reports.plots import Figures, render
from reports.summary import PAPER_NOTE, Summary, summarize
from reports.tables import csv_table, latex_table, main_columns, markdown, notes, paper_columns, plain

__all__ = ["render_page", "write_index", "write_report"]


def write_report(
    run_dir: Path,
    run: Mapping[str, Any],
    records: Sequence[Record],
    background: Sequence[BackgroundRecord] = (),
) -> list[Path]:
    """Write ``report/`` of a run: page, Markdown, CSV, LaTeX and figures; return the files, the page first.

    The folder appears whole or not at all; an older one is replaced.
    """
    summary = summarize(run, records, background)
    figures = render(summary)
    files: dict[str, bytes] = {
        "index.html": render_page(summary, figures).encode(),
        "report.md": markdown(summary).encode(),
        "main.csv": csv_table(summary).encode(),
        "main.tex": latex_table(summary).encode(),
    }
    for figure in figures:
        files |= {f"{figure.name}.png": figure.png, f"{figure.name}.svg": figure.svg}
    target = run_dir / "report"
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".report-") as scratch:
        fresh, old = Path(scratch, "new"), Path(scratch, "old")
        fresh.mkdir()
        for name, content in files.items():
            fresh.joinpath(name).write_bytes(content)
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if old.exists():
                shutil.move(old, target)
            raise
    return [target / name for name in files]


def write_index(
    out_dir: Path,
    runs: Sequence[tuple[Path, Mapping[str, Any], Sequence[Record], Sequence[BackgroundRecord]]],
) -> Path:
    """Write ``index.html`` over several runs, with relative links to their reports; return its path."""
    out_dir.mkdir(parents=True, exist_ok=True)
    entries = []
    for run_dir, run, records, background in runs:
        summary = summarize(run, records, background)
        link = os.path.relpath(run_dir / "report" / "index.html", out_dir)
        entries.append(
            {
                "summary": summary,
                "link": quote(Path(link).as_posix()),
                "columns": main_columns(summary),
                "sentences": findings(summary),
            }
        )
    page = out_dir / "index.html"
    scratch = page.with_name(".index.html.new")
    scratch.write_text(_environment().get_template("index.html").render(entries=entries), encoding="utf-8")
    scratch.replace(page)
    return page


def render_page(summary: Summary, figures: Sequence[Figures]) -> str:
    """Return the page of one run: a single file that asks nothing of the network."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            summary=summary,
            run=_Lenient(summary.run),
            sentences=findings(summary),
            columns=main_columns(summary),
            beside=paper_columns(summary),
            paper_note=PAPER_NOTE,
            notes=notes(summary),
            figures=[{"src": _data_uri(figure.svg), "caption": figure.caption} for figure in figures],
            details={row.cell: cell_details(row, summary.scores) for row in summary.rows},
            examples={row.cell: examples(row) for row in summary.rows},
            environment=environment(summary.run),
            command=command(summary.run),
            config=json.dumps(summary.run["config"], indent=2, ensure_ascii=False, default=str),
            definitions=definitions(summary),
        )
    )


class _Lenient(dict[str, Any]):
    """``run.json`` for the template: a field that isn't there is None."""

    def __missing__(self, key: str) -> None:
        return None


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _environment() -> Environment:
    env = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["plain"] = lambda value: plain(str(value))
    env.filters["code"] = _code
    templates = resources.files("reports").joinpath("templates")
    env.globals["style"] = templates.joinpath("style.css").read_text(encoding="utf-8")
    env.globals["script"] = templates.joinpath("sort.js").read_text(encoding="utf-8")
    return env


def _code(text: str) -> Markup:
    """Escape text and set what stands in backticks as code."""
    parts = re.split(r"`([^`]*)`", plain(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )

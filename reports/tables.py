"""The main table as Markdown, CSV, LaTeX, and for the terminal, from one list of columns."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.metrics import METRICS, Metric, score_metric
from bench.statistics import Estimate, format_estimate, format_p
from reports.summary import PAPER_NOTE, CellSummary, Summary, Twin

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Column",
    "csv_table",
    "latex_table",
    "main_columns",
    "markdown",
    "notes",
    "paper_columns",
    "plain",
    "show",
]


@dataclass(frozen=True)
class Column:
    """One column of a table for people.

    Attributes:
        key: Stable name.
        head: Heading, with the unit.
        text: What a row shows.
        sort: What a row sorts by; None sorts last.
        numeric: Whether it is set right-aligned.
    """

    key: str
    head: str
    text: Callable[[CellSummary], str]
    sort: Callable[[CellSummary], float | str | None]
    numeric: bool = True


def plain(text: str) -> str:
    """Return text with control, bidirectional and other invisible characters shown as ``<U+202E>``."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co") else f"<U+{ord(c):04X}>"
        for c in text
    )


def _interval_column(key: str, head: str, scale: float, decimals: int) -> Column:
    def estimate(row: CellSummary) -> Estimate | None:
        return row.intervals.get(key)

    def text(row: CellSummary) -> str:
        return format_estimate(estimate(row), scale=scale, decimals=decimals)

    return Column(key, head, text, lambda row: None if estimate(row) is None else row.values.get(key))


def _latency_column(summary: Summary, key: str, head: str) -> Column:
    values = [row.values.get(key) for row in summary.rows]
    fast = any(value is not None and value < 0.1 for value in values)
    return _interval_column(key, head, 1, 3 if fast else 2)


def _value_column(metric: Metric, head: str) -> Column:
    return Column(
        metric.key,
        head,
        lambda row: metric.format(row.values.get(metric.key)),
        lambda row: row.values.get(metric.key),
    )


def _speedup(row: CellSummary) -> Estimate | None:
    return row.comparison.speedup if row.comparison else None


def _difference(row: CellSummary) -> Estimate | None:
    return row.comparison.accuracy_difference if row.comparison else None


def _warm(row: CellSummary) -> Estimate | None:
    return row.comparison.warm_speedup if row.comparison else None


def _cache_gen(row: CellSummary) -> tuple[float, float] | None:
    accepted, attempted = row.values.get("cache_gen_accepted"), row.values.get("cache_gen_attempted")
    return None if accepted is None or attempted is None else (accepted, attempted)


def _ratio_text(pair: tuple[float, float] | None) -> str:
    return "n/a" if pair is None else f"{pair[0]:.0f}/{pair[1]:.0f}"


def _twin_column(
    key: str, head: str, read: Callable[[Twin], Estimate | None], scale: float, decimals: int
) -> Column:
    def estimate(row: CellSummary) -> Estimate | None:
        return read(row.twin) if row.twin else None

    def text(row: CellSummary) -> str:
        return format_estimate(estimate(row), scale=scale, decimals=decimals)

    return Column(key, head, text, lambda row: _point(estimate(row)))


def _versus(row: CellSummary, text: str) -> str:
    return "baseline" if row.is_baseline else text


def _point(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def main_columns(summary: Summary) -> list[Column]:
    """Return the columns of the main table; those of parts that no row uses are left out."""
    base = summary.baseline
    several = len(summary.workloads) > 1
    columns = [Column("workload", "Workload", lambda r: plain(r.workload), lambda r: r.workload, False)]
    columns = columns if several else []
    columns += [
        Column("method", "Method", lambda r: plain(r.name), lambda r: r.name.lower(), False),
        Column("n", "n", lambda r: str(r.n), lambda r: r.n),
        _interval_column("accuracy", "Accuracy, %", 100, 1),
    ]
    columns += [_interval_column(f"score_{s}", f"{score_metric(s).name}, %", 100, 1) for s in summary.scores]
    if base is not None:
        columns.append(
            Column(
                "accuracy_difference",
                f"Against {base}, points",
                lambda r: _versus(r, format_estimate(_difference(r), scale=100, decimals=1, sign=True)),
                lambda r: _point(_difference(r)),
            )
        )
        columns.append(
            Column(
                "mcnemar_p_holm",
                "p (Holm)",
                lambda r: "" if r.is_baseline else format_p(r.comparison.p_holm if r.comparison else None),
                lambda r: r.comparison.p_holm if r.comparison else None,
            )
        )
    columns += [
        _latency_column(summary, "latency_mean", "Latency, mean, s"),
        _latency_column(summary, "latency_p50", "p50, s"),
        _latency_column(summary, "latency_p90", "p90, s"),
    ]
    if base is not None:
        columns.append(
            Column(
                "speedup",
                f"Speed-up over {base}, ×",
                lambda r: _versus(r, format_estimate(_speedup(r), decimals=2)),
                lambda r: _point(_speedup(r)),
            )
        )
    columns += [
        _interval_column("hit_rate", "Hit, %", 100, 1),
        _interval_column("hit_accuracy", "Hit accuracy, %", 100, 1),
    ]
    if any(row.intervals.get("false_hit_rate") for row in summary.rows):  # a rate of 0 is a result
        columns.append(_interval_column("false_hit_rate", "False hits, % of hits", 100, 1))
    if any(row.intervals.get("hit_rate_with_entry") for row in summary.rows):
        columns.append(_interval_column("hit_rate_with_entry", "Hit once an entry is there, %", 100, 1))
    if any(_cache_gen(row) for row in summary.rows):
        columns.append(
            Column(
                "cache_gen",
                "Cache Gen.",
                lambda r: _ratio_text(_cache_gen(r)),
                lambda r: r.values.get("cache_gen_accepted"),
            )
        )
    if base is not None and any(_warm(row) for row in summary.rows):
        columns.append(
            Column(
                "warm_speedup",
                f"Speed-up after warm-up over {base}, ×",
                lambda r: _versus(r, format_estimate(_warm(r), decimals=2)),
                lambda r: _point(_warm(r)),
            )
        )
    if any(row.twin for row in summary.rows):
        columns += [
            _twin_column("twin_speedup", "Speed-up over the plain twin, ×", lambda t: t.speedup, 1, 2),
            _twin_column("answer_flips", "Answers flipped, %", lambda t: t.flips, 100, 1),
            _value_column(METRICS["acceptance_length"], "Acceptance length"),
        ]
    columns += [
        _value_column(METRICS["target_calls"], "Target calls"),
        _value_column(METRICS["target_tokens_in"], "Target tokens in"),
        _value_column(METRICS["target_tokens_out"], "Target tokens out"),
    ]
    optional = [
        _value_column(METRICS["small_calls"], "Small calls"),
        _value_column(METRICS["small_tokens_in"], "Small tokens in"),
        _value_column(METRICS["small_tokens_out"], "Small tokens out"),
    ]
    columns += [c for c in optional if any(c.sort(row) not in (None, 0) for row in summary.rows)]
    if any(row.unranked for row in summary.rows):
        columns.append(Column("ranked", "Ranked", _ranked, lambda r: r.unranked, False))
    return columns


def _ranked(row: CellSummary) -> str:
    return f"not ranked: {row.unranked}" if row.unranked else "yes"


def paper_columns(summary: Summary) -> list[Column]:
    """Return the columns of the table that sets ours beside the paper's; empty without a paper."""
    if summary.paper_label is None:
        return []
    base, theirs = summary.baseline or "baseline", summary.paper_label

    def column(key: str, head: str, scale: float, decimals: int) -> Column:
        def value(row: CellSummary) -> float | None:
            found: float | None = getattr(row.paper, key, None)
            return found

        def text(row: CellSummary) -> str:
            found = value(row)
            return "not stated" if found is None else f"{found * scale:.{decimals}f}"

        return Column(f"paper_{key}", f"{head}: {theirs}", text, value)

    lead = [c for c in main_columns(summary) if c.key in ("workload", "method")]
    ours = {c.key: c for c in main_columns(summary)}

    def mine(key: str, head: str) -> list[Column]:
        found = ours.get(key)
        return [] if found is None else [Column(key, f"{head}: ours", found.text, found.sort)]

    return [
        *lead,
        *mine("speedup", f"Speed-up over {base}, ×"),
        column("speedup", f"Speed-up over {base}, ×", 1, 2),
        *mine("accuracy", "Accuracy, %"),
        column("accuracy", "Accuracy, %", 100, 2),
        *mine("hit_rate", "Hit, %"),
        column("hit_rate", "Hit, %", 100, 2),
        *mine("hit_accuracy", "Hit accuracy, %"),
        column("hit_accuracy", "Hit accuracy, %", 100, 2),
        *mine("latency_mean", "Latency, mean, s"),
        column("latency_s", "Latency, mean, s", 1, 3),
        *(_paper_cache_gen(theirs, ours) if "cache_gen" in ours else []),
    ]


def _paper_cache_gen(label: str, ours: Mapping[str, Column]) -> list[Column]:
    def stated(row: CellSummary) -> tuple[int, int] | None:
        return row.paper.cache_gen if row.paper else None

    def text(row: CellSummary) -> str:
        return _ratio_text(stated(row)) if stated(row) else "not stated"

    def sort(row: CellSummary) -> float | None:
        found = stated(row)
        return float(found[0]) if found else None

    mine = ours["cache_gen"]
    return [
        Column("cache_gen", "Cache Gen.: ours", mine.text, mine.sort),
        Column("paper_cache_gen", f"Cache Gen.: {label}", text, sort),
    ]


def notes(summary: Summary) -> list[str]:
    """Return the lines that belong under the main table."""
    lines = [
        f"Source: {summary.source}.",
        "Brackets: 95 % intervals; Wilson for shares, order statistics for quantiles (n/a where the sample "
        "is too small), bootstrap for means. Accuracy counts every attempted request, failures as wrong; "
        "copies of one question count as one observation in the intervals of shares.",
    ]
    compared = [row.comparison for row in summary.rows if row.comparison]
    if compared:
        least = min(comparison.clusters for comparison in compared)
        lines.append(
            f"Against {summary.baseline}: paired, one run; ratio of mean latencies and difference of "
            "accuracies over the same samples, bootstrap over the samples' groups; exact McNemar, Holm over "
            "the methods." + (f" Only {least} groups: read these intervals as rough." if least < 10 else "")
        )
    if any(row.data.background for row in summary.rows):
        lines.append(
            "Calls and tokens include the work beside the requests (making cache entries). Cache Gen.: "
            "entries accepted/attempted. After warm-up: requests that came after the last new entry."
        )
    if any(row.twin for row in summary.rows):
        lines.append(
            "+SpecDec rows: a small model drafts for the target. Their twin is the plain row of the same "
            "method: paired, one run. An answer flipped where the extracted answers differ (the replies, "
            "where nothing is graded); a cache that was filled at other moments flips answers, too."
        )
    if any(row.unranked for row in summary.rows):
        lines.append("A row below 99 % coverage is not ranked.")
    return lines


def _cell_markdown(text: str) -> str:
    for character in "\\|`*_<>[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _markdown_table(columns: Sequence[Column], rows: Sequence[CellSummary]) -> list[str]:
    lines = ["| " + " | ".join(_cell_markdown(c.head) for c in columns) + " |"]
    lines.append("| " + " | ".join("---:" if c.numeric else "---" for c in columns) + " |")
    for row in rows:
        lines.append("| " + " | ".join(_cell_markdown(c.text(row)) for c in columns) + " |")
    return lines


def markdown(summary: Summary) -> str:
    """Return verdict, main table and paper table as Markdown."""
    lines = [f"# {_cell_markdown(plain(summary.title))}", ""]
    lines.append(f"**{'VALID' if summary.valid else 'INVALID'}**: {_cell_markdown(summary.source)}")
    lines += [
        f"- {_cell_markdown(plain(r['problem']))} Remedy: {plain(r['remedy'])}" for r in summary.reasons
    ]
    lines += ["", *_markdown_table(main_columns(summary), summary.rows), ""]
    lines += [f"- {_cell_markdown(plain(note))}" for note in notes(summary)]
    beside = paper_columns(summary)
    if beside:
        lines += ["", "## Beside the paper", "", PAPER_NOTE, "", *_markdown_table(beside, summary.rows)]
    return "\n".join(lines) + "\n"


def csv_table(summary: Summary) -> str:
    """Return one line per cell with raw numbers at full precision, units in the column names.

    Fractions are in [0, 1]; an empty field is "no value".
    """
    metrics = [*METRICS.values(), *(score_metric(name) for name in summary.scores)]
    lines: list[dict[str, object]] = []
    for row in summary.rows:
        line: dict[str, object] = {
            "run": summary.run["id"],
            "source": summary.run.get("source"),
            "run_valid": summary.valid,
            "cell": row.cell,
            "workload": row.workload,
            "method": row.method,
            "is_baseline": row.is_baseline,
            "ranked": not row.unranked,
        }
        for metric in metrics:
            line[metric.column] = row.values.get(metric.key)
            if metric.key in row.intervals:
                estimate = row.intervals[metric.key]
                line[f"{metric.column}_low"] = estimate.low if estimate else None
                line[f"{metric.column}_high"] = estimate.high if estimate else None
        compared = row.comparison
        for key, pair in (
            ("speedup_over_baseline_ratio", _speedup(row)),
            ("accuracy_minus_baseline_fraction", _difference(row)),
            ("warm_speedup_over_baseline_ratio", _warm(row)),
            ("speedup_over_twin_ratio", row.twin.speedup if row.twin else None),
            ("answer_flips_fraction", row.twin.flips if row.twin else None),
        ):
            line[key], line[f"{key}_n"] = _point(pair), pair.n if pair else None
            line[f"{key}_low"], line[f"{key}_high"] = (pair.low, pair.high) if pair else (None, None)
        line["mcnemar_p"] = compared.p if compared else None
        line["mcnemar_p_holm"] = compared.p_holm if compared else None
        line["pairing_clusters"] = compared.clusters if compared else None
        for key in ("accuracy", "latency_s", "hit_rate", "hit_accuracy", "speedup"):
            unit = {"latency_s": "", "speedup": "_ratio"}.get(key, "_fraction")
            line[f"paper_{key}{unit}"] = getattr(row.paper, key, None)
        lines.append(line)
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "×": r"$\times$",
    "\N{MINUS SIGN}": r"$-$",
    "\N{EN DASH}": "--",
    "[": "{[}",
    "]": "{]}",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(plain(text).split()))


def latex_table(summary: Summary) -> str:
    """Return the main table as a LaTeX ``tabular`` with booktabs rules."""
    columns = main_columns(summary)
    lines = [r"% needs \usepackage{booktabs}; " + f"run {' '.join(plain(str(summary.run['id'])).split())}"]
    lines.append(r"\begin{tabular}{" + "".join("r" if c.numeric else "l" for c in columns) + "}")
    lines += [r"\toprule", " & ".join(_latex(c.head) for c in columns) + r" \\", r"\midrule"]
    previous: str | None = None
    for row in summary.rows:
        if previous not in (None, row.workload):
            lines.append(r"\midrule")
        previous = row.workload
        lines.append(" & ".join(_latex(c.text(row)) for c in columns) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [f"% {' '.join(plain(note).split())}" for note in notes(summary)]
    return "\n".join(lines) + "\n"


def show(summary: Summary) -> Table:
    """Return the main table for a rich console, narrowed to what fits a terminal."""
    from rich.table import Table
    from rich.text import Text

    status = "VALID" if summary.valid else "INVALID"
    table = Table(
        title=Text(f"{plain(summary.title)} \N{EM DASH} {status}"),
        caption=Text(summary.source),
        title_style="bold green" if summary.valid else "bold red",
    )
    terse = ("workload", "method", "n", "accuracy", "latency_mean", "speedup", "hit_rate", "ranked")
    columns = [column for column in main_columns(summary) if column.key in terse]
    for column in columns:
        table.add_column(Text(column.head), justify="right" if column.numeric else "left")
    for row in summary.rows:
        style = "dim" if row.unranked else ""
        table.add_row(*(Text(column.text(row)) for column in columns), style=style)
    return table

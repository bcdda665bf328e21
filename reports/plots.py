"""Figures: accuracy against latency, and the distribution of latencies.

Matplotlib and seaborn are imported inside the functions; the bytes of a figure depend on its data alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bench.metrics import NS
from bench.statistics import Estimate
from reports.labels import LAYOUT_DPI, place
from reports.summary import CellSummary, Summary, display_name
from reports.tables import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Figures", "Look", "accuracy_latency", "latency_distribution", "looks", "render"]

# Okabe and Ito's palette, safe for colour-blind readers; its yellow is too pale on white.
_PALETTE = ("#000000", "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#D55E00", "#56B4E9", "#7F7F7F")
_KNOWN = ("direct", "pot", "exactcache", "gptcache", "gencache", "minicache")
_MARKERS = ("o", "s", "D", "^", "v", "P")
_DPI = 150
_MOST_POINTS = 300
"""Points drawn per strip; more would only blacken it."""


@dataclass(frozen=True)
class Look:
    """How a method is drawn, the same in every figure: colour by method, hollow with speculative decoding."""

    colour: str
    marker: str
    hollow: bool


@dataclass(frozen=True)
class Figures:
    """One figure in both formats.

    Attributes:
        name: File name without its ending.
        caption: What it shows, n and how to read it; also its alternative text.
        png, svg: The files' bytes.
    """

    name: str
    caption: str
    png: bytes
    svg: bytes


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """Return each method's look; known methods always have the same, others take what is left, in order."""
    bases = list(dict.fromkeys(method.removesuffix("+specdec") for method in methods))
    others = [base for base in bases if base not in _KNOWN]
    slot = {base: _KNOWN.index(base) for base in bases if base in _KNOWN}
    spare = [i for i in range(len(_PALETTE)) if i >= len(_KNOWN)]
    spare += [i for i in range(len(_KNOWN)) if i not in slot.values()]
    for position, base in enumerate(others):
        slot[base] = spare[position] if position < len(spare) else position
    repeated = {base: max(0, others.index(base) - len(spare) + 1) for base in others}
    result: dict[str, Look] = {}
    for method in methods:
        base = method.removesuffix("+specdec")
        marker = _MARKERS[(repeated.get(base, 0) + (base in others)) % len(_MARKERS)]
        result[method] = Look(_PALETTE[slot[base] % len(_PALETTE)], marker, method != base)
    return result


def render(summary: Summary) -> list[Figures]:
    """Return every figure that the data allow, for each workload."""
    look = looks([row.method for row in summary.rows])
    drawn: list[Figures | None] = []
    for workload in summary.workloads:
        rows = summary.of(workload)
        drawn.append(accuracy_latency(summary, workload, rows, look))
        drawn.append(latency_distribution(summary, workload, rows, look))
    return [figure for figure in drawn if figure is not None]


def accuracy_latency(
    summary: Summary, workload: str, rows: Sequence[CellSummary], look: Mapping[str, Look]
) -> Figures | None:
    """Draw accuracy against mean latency with both intervals, and the paper's points in a panel of their own.

    None where no row has both.
    """
    ours = [
        (row, mean, accuracy)
        for row in rows
        if (mean := row.intervals.get("latency_mean")) and (accuracy := row.intervals.get("accuracy"))
    ]
    theirs = [
        (
            row.method,
            Estimate(row.paper.latency_s, None, None, 0),
            Estimate(row.paper.accuracy, None, None, 0),
        )
        for row in rows
        if row.paper and row.paper.latency_s and row.paper.accuracy is not None
    ]
    if not ours:
        return None
    theirs = theirs if len(theirs) > 1 else []
    with _style():
        from matplotlib.figure import Figure

        size = (10.4, 4.8) if theirs else (7.2, 4.8)
        figure = Figure(figsize=size, dpi=LAYOUT_DPI, layout="constrained")
        panels = figure.subplots(
            1, 2 if theirs else 1, squeeze=False, width_ratios=[3, 2] if theirs else None
        )[0]
        _scatter(panels[0], [(row.method, mean, accuracy) for row, mean, accuracy in ours], look)
        panels[0].set_title(f"Ours, {_fit(workload)}", loc="left")
        panels[0].set_ylabel("Accuracy, %")
        if theirs:
            _scatter(panels[1], theirs, look)
            label = str(summary.paper_label)
            panels[1].set_title(f"{label[:1].upper()}{label[1:]}\non different hardware", loc="left")
            panels[1].set_facecolor("#F4F4F4")
        place(figure, panels)
        caption = (
            f"Accuracy against mean latency on {workload}; {_sizes([row for row, _, _ in ours])}. "
            f"Upper left is better. Bars: 95 % intervals. Source: {summary.source}."
            + (
                " Right: what the paper states, on different hardware; compare the order only."
                if theirs
                else ""
            )
            + (
                " Hollow: with speculative decoding."
                if any(look[row.method].hollow for row, _, _ in ours)
                else ""
            )
        )
        return _save(figure, f"accuracy-latency-{_slug(workload)}", caption)


def latency_distribution(
    summary: Summary, workload: str, rows: Sequence[CellSummary], look: Mapping[str, Look]
) -> Figures | None:
    """Draw every request's latency, one strip per method with its median, hits apart from misses.

    None where nothing was answered.
    """
    shown = [row for row in rows if row.data.answered]
    if not shown:
        return None
    with _style():
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        figure = Figure(figsize=(8.0, 1.5 + 0.62 * len(shown)), dpi=LAYOUT_DPI, layout="constrained")
        axes = figure.subplots()
        thinned = False
        everything: list[float] = []
        for position, row in enumerate(shown):
            colour = look[row.method].colour
            for hit in (False, True):
                found = [max(r.latency_ns / NS, 1e-6) for r in row.data.answered if r.hit == hit]
                values = np.sort(np.asarray(found))
                if values.size > _MOST_POINTS:
                    thinned = True
                    values = values[np.linspace(0, values.size - 1, _MOST_POINTS).round().astype(int)]
                everything += values.tolist()
                offset = (0.2 if hit else -0.08) + _spread(values.size) * (0.1 if hit else 0.16)
                axes.scatter(
                    values,
                    position + (offset if row.data.caches else _spread(values.size) * 0.24),
                    s=20,
                    marker="D" if hit else "o",
                    facecolor=colour if hit else "none",
                    edgecolor=colour,
                    linewidth=0.9,
                    alpha=0.75,
                )
            latencies = [r.latency_ns / NS for r in row.data.answered]
            axes.plot([np.median(latencies)] * 2, [position - 0.38, position + 0.38], color="#222222", lw=2.2)
        axes.set_yticks(range(len(shown)), [_fit(row.name) for row in shown])
        axes.set_ylim(len(shown) - 0.45, -0.55)
        _latency_axis(axes, everything)
        axes.set_title(f"Latency per request, {_fit(workload)}", loc="left")
        keys = [
            Line2D([], [], color="#222222", lw=2.2, label="median"),
            Line2D([], [], ls="", marker="o", mfc="none", mec="#444444", label="computed"),
        ]
        if any(row.data.hits for row in shown):
            keys.append(Line2D([], [], ls="", marker="D", mfc="#444444", mec="#444444", label="cache hit"))
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
        caption = (
            f"Latency of every answered request on {workload}, from its scheduled time; {_sizes(shown)}. "
            f"The bar is the median"
            + (", filled diamonds are cache hits" if any(row.data.hits for row in shown) else "")
            + f". Source: {summary.source}."
            + (f" At most {_MOST_POINTS} evenly ranked points per strip are drawn." if thinned else "")
        )
        return _save(figure, f"latency-{_slug(workload)}", caption)


def _sizes(rows: Sequence[CellSummary]) -> str:
    counts = {row.n for row in rows}
    if len(counts) == 1:
        return f"n = {counts.pop()} requests per method"
    return "n = " + ", ".join(f"{row.n} ({row.name})" for row in rows)


def _spread(count: int) -> Any:
    """Return a low-discrepancy jitter in [-1, 1], the same every time."""
    return 2 * ((np.arange(count) * 0.618033988749895) % 1) - 1


def _scatter(axes: Axes, points: Sequence[tuple[str, Estimate, Estimate]], look: Mapping[str, Look]) -> None:
    for method, mean, accuracy in points:
        style = look[method]
        axes.errorbar(
            mean.value,
            accuracy.value * 100,
            xerr=_arms(mean, 1),
            yerr=_arms(accuracy, 100),
            fmt=style.marker,
            color=style.colour,
            mfc="white" if style.hollow else style.colour,
            mew=1.6,
            ms=8,
            elinewidth=1.1,
            capsize=0,
            ecolor=(style.colour, 0.55),
            zorder=3,
            label=_fit(display_name(method)),
        )
    ends = [
        end
        for _, mean, _ in points
        for end in (mean.low, mean.value, mean.high)
        if end is not None and end > 0
    ]
    _latency_axis(axes, ends, "Mean latency, s")
    low, high = axes.get_ylim()
    pad = max(3.0, (high - low) * 0.08)
    axes.set_ylim(max(-4, low - pad), min(104, high + pad))


def _arms(estimate: Estimate, scale: float) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    return [[max(0.0, below) * scale], [max(0.0, above) * scale]]


def _latency_axis(axes: Axes, values: Sequence[float], label: str = "Latency, s") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    if low > 0 and high > 10 * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.6, high * 1.6)
        decades = math.log10(high / low)
        subs = (1.0, 2.0, 5.0) if decades < 2 else (1.0, 3.0) if decades < 3 else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        label += " (log scale)"
    else:
        span = (high - low) or high or 1.0
        axes.set_xlim(max(0.0, low - 0.2 * span) if low < span else low - 0.2 * span, high + 0.35 * span)
    axes.set_xlabel(label)


def _fit(text: str) -> str:
    """Return text that the figures' font can draw, in one line."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    known = font.get_charmap()
    flat = " ".join(plain(text).split())
    flat = flat if len(flat) <= 32 else flat[:31] + "…"
    return "".join(c if ord(c) in known else "?" for c in flat)


def _slug(text: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in text)
    return kept.strip(".-") or "workload"


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl
    import seaborn as sns  # type: ignore[import-untyped]

    style = {
        **sns.axes_style("whitegrid"),
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.edgecolor": "#888888",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#E4E4E4",
        "xtick.bottom": True,
        "text.parse_math": False,
        "svg.hashsalt": "reusebench",
        "svg.fonttype": "path",
    }
    with mpl.rc_context(style):
        yield


def _save(figure: Figure, name: str, caption: str) -> Figures:
    files: dict[str, bytes] = {}
    formats: tuple[tuple[Literal["png", "svg"], dict[str, Any]], ...] = (
        ("png", {"Software": None}),
        ("svg", {"Date": None, "Creator": None}),
    )
    for kind, metadata in formats:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
        files[kind] = buffer.getvalue()
    return Figures(name, plain(caption), files["png"], files["svg"])

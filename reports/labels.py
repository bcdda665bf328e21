"""Names beside the points of a scatter plot, where they meet no other name, point or bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LAYOUT_DPI", "place"]

LAYOUT_DPI = 72
"""A figure's resolution while names are placed: a pixel is a point, so that PNG and SVG agree."""

_SHORT = 20.0
"""Distance of a name from its point, in points, below which no line joins the two."""

_ANGLES = (1, 7, 15, 9, 3, 5, 13, 11, 0, 8, 4, 12)
_OFFSETS = [
    (math.cos(a * math.pi / 8) * r, math.sin(a * math.pi / 8) * r)
    for r in (11, 17, 24, 33, 43, 55, 68, 82)
    for a in _ANGLES
]


def place(figure: Figure, panels: Sequence[Axes]) -> None:
    """Write each error-bar container's label beside its point, and fix the figure's layout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")
    for axes in panels:
        _place(axes, canvas.get_renderer())


def _place(axes: Axes, renderer: Any) -> None:
    from matplotlib.transforms import Bbox

    drawn: list[Any] = list(axes.containers)
    points: list[Any] = []
    bars: list[Any] = []
    names: list[Any] = []
    for container in drawn:
        line, _, arms = container.lines
        x, y = axes.transData.transform((line.get_xdata()[0], line.get_ydata()[0]))
        points.append(Bbox.from_extents(x - 6, y - 6, x + 6, y + 6))
        for arm in arms:
            for segment in arm.get_segments():
                (x0, y0), (x1, y1) = axes.transData.transform(segment)
                bars.append(
                    Bbox.from_extents(min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1)
                )
    frame = axes.get_window_extent(renderer)
    for container in drawn:
        line = container.lines[0]
        point = (line.get_xdata()[0], line.get_ydata()[0])
        text = axes.annotate(
            container.get_label(),
            point,
            xytext=(0, 0),
            textcoords="offset points",
            color=_dark(line.get_color()),
            fontsize=9.5,
            weight="bold",
            annotation_clip=False,
        )

        def move(offset: tuple[float, float], text: Any = text) -> Any:
            dx, dy = offset
            text.set_position(offset)
            text.set_horizontalalignment("left" if dx > 3 else "right" if dx < -3 else "center")
            text.set_verticalalignment("center" if abs(dx) > 3 else "bottom" if dy > 0 else "top")
            return text.get_window_extent(renderer).expanded(1.03, 1.05)

        def cost(offset: tuple[float, float], point: Any = point, move: Any = move) -> float:
            box, leader = move(offset), _leader(axes, point, offset)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            total: float = (
                50.0 * sum(box.overlaps(other) for other in (*points, *names))
                + 8 * sum(box.overlaps(bar) for bar in bars)
                + 15 * sum(any(other.overlaps(dot) for dot in leader) for other in (*names, *points))
                + (0 if inside else 40)
                + math.hypot(*offset) / 8
            )
            return total

        best = min(_OFFSETS, key=cost)
        names.append(move(best))
        bars.extend(_leader(axes, point, best))
        if math.hypot(*best) >= _SHORT:
            arrow = {"arrowstyle": "-", "color": line.get_color(), "lw": 0.7, "shrinkA": 2, "shrinkB": 4}
            axes.annotate(
                "",
                point,
                xytext=best,
                textcoords="offset points",
                arrowprops=arrow,
                annotation_clip=False,
            )


def _leader(axes: Axes, point: tuple[Any, Any], offset: tuple[float, float]) -> list[Any]:
    """Return small boxes along the line from a point to its name; none for a short one, which isn't drawn."""
    from matplotlib.transforms import Bbox

    if math.hypot(*offset) < _SHORT:
        return []
    x, y = axes.transData.transform(point)
    steps = [(x + offset[0] * t / 12, y + offset[1] * t / 12) for t in range(4, 12)]
    return [Bbox.from_extents(a - 1, b - 1, a + 1, b + 1) for a, b in steps]


def _dark(colour: str) -> tuple[float, ...]:
    """Return a shade of a colour that is readable as text on white."""
    from matplotlib.colors import to_rgb

    return tuple(0.72 * part for part in to_rgb(colour))

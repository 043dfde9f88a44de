"""Draws curves, such as that of a loss, as text for a terminal, as SVG, and as PNG."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

# A braille character has 2 x 4 dots; bit values by (column, row from the top).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def smoothed(values: Sequence[float], weight: float = 0.6) -> list[float]:
    """Exponential moving average with bias correction."""
    average, total_weight, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total_weight = weight * total_weight + (1 - weight)
        result.append(average / total_weight)
    return result


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high, in steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = min((power * n for n in (1, 2, 5, 10)), key=lambda step: abs(span / step - about))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 10) for n in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The values of one run at some of its steps, in order. There is at least one."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


#: A character, and the number of the curve that it belongs to; None for the frame.
Cell = tuple[str, int | None]

#: One for each curve, in turn, where there are no colors.
MARKS = "*+ox#@%&"


def as_text(
    values: Sequence[float], *, width: int = 60, height: int = 10, braille: bool = True
) -> list[str]:
    """A curve from step 1 on and its axes as lines of text, in braille characters or asterisks."""
    curve = Curve(label="", steps=range(1, len(values) + 1), values=values)
    lines = as_cells([curve], width=width, height=height, braille=braille, from_zero=True)
    return ["".join(char for char, _ in line).rstrip() for line in lines]


def as_cells(
    curves: Sequence[Curve],
    *,
    width: int = 60,
    height: int = 10,
    braille: bool = True,
    from_zero: bool = False,
) -> list[list[Cell]]:
    """Curves over one pair of axes, as lines of cells, for the caller to color."""
    across, down = (2 * width, 4 * height) if braille else (width, height)
    every = [value for curve in curves for value in curve.values]
    levels = ticks(min(0.0, *every) if from_zero else min(every), max(every), about=4)
    low, high = levels[0], levels[-1]
    first = min(curve.steps[0] for curve in curves)
    last = max(curve.steps[-1] for curve in curves)
    dots = [[0] * width for _ in range(height)]
    owners: list[list[int | None]] = [[None] * width for _ in range(height)]
    for number, curve in enumerate(curves):
        start, values = _resampled(curve, first, last, across)
        rows = _connected([_row(value, low, high, down) for value in values])
        for column, reached in enumerate(rows, start):
            for row in reached:
                x, y = (column // 2, row // 4) if braille else (column, row)
                owners[y][x] = number
                dots[y][x] |= _DOTS[column % 2][row % 4] if braille else 1
    labels = {_row(level, low, high, height): f"{level:g}" for level in levels}
    margin = max(6, *map(len, labels.values()))
    lines: list[list[Cell]] = []
    for row in range(height):
        axis = ("┤" if row in labels else "│") if braille else "|"
        line: list[Cell] = [(char, None) for char in f"{labels.get(row, ''):>{margin}} {axis}"]
        for dot, owner in zip(dots[row], owners[row], strict=True):
            mark = MARKS[(owner or 0) % len(MARKS)]
            line.append((" " if not dot else chr(0x2800 + dot) if braille else mark, owner))
        lines.append(line)
    corner, floor = ("└", "─") if braille else ("+", "-")
    begins, ends = f"step {first}", f"step {last}"
    below = [
        f"{'':>{margin}} {corner}{floor * width}",
        f"{'':>{margin}}  {begins}{ends:>{width - len(begins)}}",
    ]
    return lines + [[(char, None) for char in text] for text in below]


def _resampled(curve: Curve, first: int, last: int, columns: int) -> tuple[int, list[float]]:
    """The curve at each column that it covers, by linear interpolation, and the first of these."""
    steps, values = curve.steps, curve.values
    if first == last:
        return 0, [values[0]] * columns  # a single step is a line across
    per_step = (columns - 1) / (last - first)
    start = round((steps[0] - first) * per_step)
    stop = round((steps[-1] - first) * per_step)
    found = []
    for column in range(start, stop + 1):
        at = min(max(first + column / per_step, steps[0]), steps[-1])
        right = bisect.bisect_left(steps, at)
        left = max(0, right - 1)
        fraction = (at - steps[left]) / ((steps[right] - steps[left]) or 1)
        found.append(values[left] * (1 - fraction) + values[right] * fraction)
    return start, found


def _row(value: float, low: float, high: float, rows: int) -> int:
    return round((high - value) / ((high - low) or 1.0) * (rows - 1))


def _connected(rows: Sequence[int]) -> list[range]:
    """The rows to draw in each column, connected to the previous column."""
    result = [range(rows[0], rows[0] + 1)]
    for before, now in itertools.pairwise(rows):
        if now > before:
            result.append(range(before + 1, now + 1))
        elif now < before:
            result.append(range(now, before))
        else:
            result.append(range(now, now + 1))
    return result


# The SVG has no colors; the page styles the classes grid, label, raw, line and dot.

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 46, 14, 14, 34


def as_svg(values: Sequence[float], *, x_label: str, y_label: str) -> str:
    """The raw and the smoothed curve, with a tooltip at every step."""
    levels = ticks(min(0.0, *values), max(values), about=5)
    low, high = levels[0], levels[-1]
    steps = len(values)

    def x(step: int) -> float:
        inside = _WIDTH - _LEFT - _RIGHT
        return round(_LEFT + inside * step / max(1, steps - 1), 1)

    def y(value: float) -> float:
        inside = _HEIGHT - _TOP - _BOTTOM
        return round(_TOP + inside * (high - value) / ((high - low) or 1.0), 1)

    def line(points: Sequence[float], name: str) -> str:
        path = " ".join(f"{x(step)},{y(value)}" for step, value in enumerate(points))
        return f'<polyline class="{name}" points="{path}"/>'

    def text(at_x: float, at_y: float, anchor: str, words: object) -> str:
        return f'<text class="label" x="{at_x}" y="{at_y}" text-anchor="{anchor}">{words}</text>'

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{y_label}">']
    parts += [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(level)}" y2="{y(level)}"/>'
        + text(_LEFT - 8, y(level) + 4, "end", f"{level:g}")
        for level in levels
    ]
    parts += [text(x(mark - 1), _HEIGHT - 14, "middle", mark) for mark in _step_marks(steps)]
    parts += [text(_LEFT, _HEIGHT - 1, "start", x_label)]
    parts += [line(values, "raw"), line(smoothed(values), "line")]
    parts += [
        f'<circle class="dot" cx="{x(step)}" cy="{y(value)}" r="3.5">'
        f"<title>step {step + 1}: {value:.3f}</title></circle>"
        for step, value in enumerate(values)
    ]
    return "\n".join([*parts, "</svg>"])


def _step_marks(steps: int) -> list[int]:
    inner = [int(mark) for mark in ticks(1, steps, about=6) if 1 < mark < steps]
    # Drop a mark that would overlap the label of the last step.
    inner = [mark for mark in inner if steps - mark > steps / 20]
    return sorted({1, *inner, steps})


def write_png(
    path: Path, values: Sequence[float], *, title: str, x_label: str, y_label: str
) -> None:
    """The same chart by matplotlib. `ModuleNotFoundError` if that is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, ".-", color="#8fb8de", linewidth=1, label="each step")
    axes.plot(steps, smoothed(values), color="#1d5fa8", linewidth=2.2, label="smoothed")
    axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


# -- several runs in one chart ---------------------------------------------------------------------

#: The color of each curve, in turn: distinct for most people, on white and on black.
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def curves_as_svg(curves: Sequence[Curve], *, title: str) -> str:
    """A complete SVG file, with a legend if there are several curves."""
    every = [value for curve in curves for value in curve.values]
    levels = ticks(min(every), max(every), about=5)
    low, high = levels[0], levels[-1]
    first = min(curve.steps[0] for curve in curves)
    last = max(curve.steps[-1] for curve in curves)
    left, top, bottom = 20 + 7 * max(len(f"{level:g}") for level in levels), 34, 34
    legend = 18 * len(curves) if len(curves) > 1 else 0
    height = _HEIGHT + legend

    def x(step: float) -> float:
        inside = _WIDTH - left - _RIGHT
        return round(left + inside * (step - first) / ((last - first) or 1), 1)

    def y(value: float) -> float:
        inside = _HEIGHT - top - bottom
        return round(top + inside * (high - value) / ((high - low) or 1.0), 1)

    def text(at_x: float, at_y: float, words: object, anchor: str = "start") -> str:
        content = escape(str(words))
        return f'<text x="{at_x}" y="{at_y}" text-anchor="{anchor}">{content}</text>'

    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {font}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        text(left, 20, title),
    ]
    for level in levels:
        at = y(level)
        parts.append(
            f'<line x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="#ddd"/>'
            + text(left - 8, at + 4, f"{level:g}", "end")
        )
    marks = [mark for mark in ticks(first, last, about=6) if first <= mark <= last]
    parts += [text(x(mark), _HEIGHT - 14, f"{mark:g}", "middle") for mark in marks]
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        points = list(zip(curve.steps, curve.values, strict=True))
        path = " ".join(f"{x(step)},{y(value)}" for step, value in points)
        parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}">'
            f"<title>{escape(curve.label)}</title></polyline>"
        )
        if len(points) == 1:
            parts.append(
                f'<circle cx="{x(points[0][0])}" cy="{y(points[0][1])}" r="3" fill="{color}"/>'
            )
        if legend:
            at = _HEIGHT + 18 * number + 4
            parts.append(
                f'<line x1="{left}" x2="{left + 22}" y1="{at - 4}" y2="{at - 4}" stroke="{color}" '
                'stroke-width="3"/>' + text(left + 30, at, curve.label)
            )
    return "\n".join([*parts, "</svg>\n"])


def write_curves_png(path: Path, curves: Sequence[Curve], *, title: str) -> None:
    """The same by matplotlib. `ModuleNotFoundError` if that is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        marker = "o" if len(curve.steps) == 1 else ""
        axes.plot(
            curve.steps, curve.values, color=color, linewidth=1.5, marker=marker, label=curve.label
        )
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        # Below the chart, so that it covers no curve.
        columns = max(1, 90 // (8 + max(len(curve.label) for curve in curves)))
        figure.legend(frameon=False, loc="outside lower center", ncols=columns)
    figure.savefig(path)

"""Draws a loss curve as text for a terminal, as SVG, and as PNG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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


def as_text(
    values: Sequence[float], *, width: int = 60, height: int = 10, braille: bool = True
) -> list[str]:
    """The curve and its axes as lines of text, in braille characters or asterisks."""
    across, down = (2 * width, 4 * height) if braille else (width, height)
    levels = ticks(min(0.0, *values), max(values), about=4)
    low, high = levels[0], levels[-1]
    dots = _connected([_row(value, low, high, down) for value in _resampled(values, across)])
    cells = [[0] * width for _ in range(height)]
    for column, rows in enumerate(dots):
        for row in rows:
            if braille:
                cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
            else:
                cells[row][column] = 1
    labels = {_row(level, low, high, height): f"{level:g}" for level in levels}
    lines = []
    for row, line in enumerate(cells):
        drawn = "".join(
            " " if not cell else chr(0x2800 + cell if braille else 0x2A) for cell in line
        )
        axis = ("┤" if row in labels else "│") if braille else "|"
        lines.append(f"{labels.get(row, ''):>6} {axis}{drawn}".rstrip())
    corner, floor = ("└", "─") if braille else ("+", "-")
    lines.append(f"{'':>6} {corner}{floor * width}")
    lines.append(f"{'':>7} step 1{f'step {len(values)}':>{width - 6}}")
    return lines


def _resampled(values: Sequence[float], length: int) -> list[float]:
    """`length` values along the curve, by linear interpolation."""
    if len(values) == 1:
        return [values[0]] * length
    result = []
    for index in range(length):
        position = index * (len(values) - 1) / (length - 1)
        left = min(int(position), len(values) - 2)
        fraction = position - left
        result.append(values[left] * (1 - fraction) + values[left + 1] * fraction)
    return result


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

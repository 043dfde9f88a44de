"""What `tinkex run plot` does with the metrics of runs: curves, a chart in a terminal, and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

import tinkex
from tinkex.cli import loss_chart
from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import write_csv
from tinkex.types import StepMetrics

#: Endings of files that can be written.
FORMATS = (".png", ".svg", ".csv")
#: The color of each run in a terminal, in turn.
_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")


@dataclass(frozen=True, kw_only=True)
class PlottedRun:
    run_id: str
    name: str | None
    points: Sequence[StepMetrics]

    @property
    def label(self) -> str:
        return f"{self.name} ({self.run_id})" if self.name else self.run_id


def fetch(client: tinkex.RestClient, run_id: str, points: int) -> PlottedRun:
    """The metrics of a run, as at most this many points."""
    run = client.get_training_run(run_id).result()
    try:
        found = client.get_training_run_metrics(run_id, points).result()
    except tinkex.NotFoundError:
        # The run is there, so it is the route that is not.
        raise CommandFailed(
            f"{client.holder.settings.base_url} does not store the metrics of steps.",
            hint="Servers of tinkex do, from the version after 0.1 on. The hosted service does not.",
        ) from None
    name = (run.user_metadata or {}).get("name")
    return PlottedRun(run_id=run_id, name=name, points=found.points)


def curve_of(run: PlottedRun, metric: str) -> loss_chart.Curve:
    """One metric of a run."""
    if not run.points:
        raise CommandFailed(f"{run.run_id} has no finished optimizer step yet.")
    chosen = [point for point in run.points if metric in point.metrics]
    if not chosen:
        known = sorted({name for point in run.points for name in point.metrics})
        raise CommandFailed(
            f"{run.run_id} has no metric {metric!r}.", hint=f"It has: {', '.join(known)}."
        )
    return loss_chart.Curve(
        label=run.label,
        steps=[point.step for point in chosen],
        values=[point.metrics[metric] for point in chosen],
    )


def draw(
    curves: Sequence[loss_chart.Curve], metric: str, *, width: int, color: bool, unicode: bool
) -> None:
    """Print a chart. Without colors, several curves get a character each."""
    braille = unicode and (color or len(curves) == 1)
    click.echo(metric)
    inside = max(20, min(width, 120) - 10)
    for line in loss_chart.as_cells(curves, width=inside, height=15, braille=braille):
        click.echo(_colored(line, color))
    for number, curve in enumerate(curves):
        mark = "━━" if braille else loss_chart.MARKS[number % len(loss_chart.MARKS)]
        if color:
            mark = click.style(mark, fg=_color(number))
        last = f"{curve.values[-1]:.4g} at step {curve.steps[-1]}"
        click.echo(f"{mark} {curve.label}: {last}")


def _colored(line: Sequence[loss_chart.Cell], color: bool) -> str:
    if not color:
        return "".join(char for char, _ in line).rstrip()
    return "".join(
        char if owner is None else click.style(char, fg=_color(owner)) for char, owner in line
    ).rstrip()


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def write(path: Path, runs: Sequence[PlottedRun], metric: str) -> None:
    """Write a chart of one metric, or with `.csv` all metrics of the runs."""
    if path.suffix == ".csv":
        names = sorted({name for run in runs for point in run.points for name in point.metrics})
        rows: list[list[Any]] = [
            [
                run.run_id,
                point.step,
                point.steps,
                point.time.isoformat(),
                *(point.metrics.get(name) for name in names),
            ]
            for run in runs
            for point in run.points
        ]
        write_csv(str(path), ["run", "step", "steps", "time", *names], rows)
        return
    curves = [curve_of(run, metric) for run in runs]
    distinct = {run.name for run in runs}
    if len(distinct) == len(runs) > 1 and None not in distinct:
        # Ids are long: six of them cover a chart.
        curves = [
            replace(curve, label=run.name or "") for curve, run in zip(curves, runs, strict=True)
        ]
    title = metric if len(runs) > 1 else f"{metric} of {runs[0].label}"
    if path.suffix == ".svg":
        path.write_text(loss_chart.curves_as_svg(curves, title=title), encoding="utf-8")
        return
    try:
        loss_chart.write_curves_png(path, curves, title=title)
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"A PNG needs {error.name}, which is not installed.",
            hint=f"pip install {error.name}, or write an .svg, which needs nothing.",
        ) from error

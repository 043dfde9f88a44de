"""`tinkex run`: list, show and plot training runs."""

from __future__ import annotations

import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

import tinkex
from tinkex.cli.completion import complete_runs
from tinkex.cli.output import (
    NONE,
    ago,
    as_json,
    examples,
    report,
    show_json,
    show_properties,
    show_table,
    yes_no,
)
from tinkex.cli.service_options import (
    fetch_pages,
    limit_option,
    list_title,
    rest_client,
    service_options,
)

PAGE_SIZE = 100
COLUMNS = {
    "id": "Run",
    "name": "Name",
    "model": "Model",
    "steps": "Steps",
    "loss": "Loss",
    "age": "Age",
    "status": "Status",
    "owner": "Owner",
    "lora": "LoRA",
    "updated": "Updated",
    "checkpoint": "Last checkpoint",
    "checkpoint_time": "Saved",
}
STYLES = {"running": "green", "failed": "red"}
DEFAULT_COLUMNS = "id,name,model,steps,loss,age,status"


@click.group("run")
def command() -> None:
    """List, show and plot training runs."""


def _columns(ctx: click.Context, param: click.Parameter, text: str | None) -> list[str]:
    given = DEFAULT_COLUMNS if text is None else text
    names = [name for name in map(str.strip, given.split(",")) if name]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not names:
        problem = (
            f"unknown column {', '.join(map(repr, unknown))}" if unknown else "no column is named"
        )
        raise click.BadParameter(f"{problem}. Choose from: {', '.join(COLUMNS)}.")
    return names


@command.command(
    "list",
    epilog=examples(
        "tinkex run list",
        "tinkex run list --limit 0 -f json",
        "tinkex run list --columns id,checkpoint,status",
    ),
)
@limit_option
@click.option(
    "--columns",
    "-c",
    callback=_columns,
    help=f"Columns to show, from: {', '.join(COLUMNS)}.  [default: {DEFAULT_COLUMNS}]",
)
@service_options
def list_(limit: int, columns: list[str]) -> None:
    """
    List training runs, newest first.

    Loss is that of the last optimizer step, per token. Age is the time since the last request.
    Status is running, idle, finished (its program has ended) or failed.
    """
    client = rest_client()

    def fetch(count: int, offset: int) -> tuple[list[tinkex.TrainingRun], int]:
        page = client.list_training_runs(limit=count, offset=offset).result()
        return page.training_runs, page.cursor.total_count

    runs, total = fetch_pages(fetch, limit=limit, page=PAGE_SIZE, what="Training runs")
    if as_json():
        show_json({"runs": runs, "total": total, "shown": len(runs)})
        return
    show_table(
        [COLUMNS[name] for name in columns],
        [[_cells(run)[name] for name in columns] for run in runs],
        title=list_title(len(runs), total, "training run"),
        styles=STYLES,
    )


@command.command("info", epilog=examples("tinkex run info RUN"))
@click.argument("run_id", metavar="RUN", shell_complete=complete_runs)
@service_options
def info(run_id: str) -> None:
    """Show one training run."""
    run = rest_client().get_training_run(run_id).result()
    if as_json():
        show_json(run)
        return
    show_properties(
        {
            "Run": run.training_run_id,
            "Name": _name(run) or NONE,
            "Base model": run.base_model,
            "Owner": run.model_owner,
            "LoRA": yes_no(run.is_lora),
            "LoRA rank": NONE if run.lora_rank is None else str(run.lora_rank),
            "Status": _status(run),
            "Steps": NONE if run.steps is None else str(run.steps),
            "Last loss": _loss(run) or NONE,
            "Last request": ago(run.last_request_time),
            "Last checkpoint": _last_checkpoint(run.last_checkpoint),
            "Last sampler checkpoint": _last_checkpoint(run.last_sampler_checkpoint),
            **{
                f"Metadata {key}": value
                for key, value in (run.user_metadata or {}).items()
                if key != "name"
            },
        }
    )


@command.command(
    "plot",
    epilog=examples(
        "tinkex run plot RUN",
        "tinkex run plot RUN OTHER --metric loss --out curves.png",
        "tinkex run plot RUN --out metrics.csv",
    ),
)
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_runs)
@click.option("--metric", default="loss", show_default=True, help="Which metric to draw.")
@click.option(
    "--points",
    type=click.IntRange(2, 10_000),
    default=1000,
    show_default=True,
    help="Maximum number of points of a run; more steps than that are averaged.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a .png, .svg or .csv file instead. A .csv has all metrics.",
)
@service_options
def plot(run_ids: tuple[str, ...], metric: str, points: int, out: Path | None) -> None:
    """Draw a metric of one or more runs over their optimizer steps."""
    from tinkex.cli import run_plot

    if out is not None and out.suffix not in run_plot.FORMATS:
        formats = ", ".join(run_plot.FORMATS)
        raise click.BadParameter(f"{str(out)!r} does not end in {formats}.", param_hint="'--out'")
    client = rest_client()
    # A run that is named twice is drawn once.
    runs = [run_plot.fetch(client, run_id, points) for run_id in dict.fromkeys(run_ids)]
    if out is not None:
        run_plot.write(out, runs, metric)
        fields = {"file": str(out), "runs": [run.run_id for run in runs]}
        report(f"Wrote {out}", fields)
        return
    if as_json():
        show_json({"runs": [{"training_run_id": run.run_id, "points": run.points} for run in runs]})
        return
    curves = [run_plot.curve_of(run, metric) for run in runs]
    terminal = sys.stdout.isatty()
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    width = shutil.get_terminal_size((80, 24)).columns
    run_plot.draw(curves, metric, width=width, color=terminal, unicode=unicode)


def _cells(run: tinkex.TrainingRun) -> dict[str, str]:
    last = run.last_checkpoint
    # In a terminal the last part is enough to tell models apart, and the table stays narrow.
    model = run.base_model.rpartition("/")[2] if sys.stdout.isatty() else run.base_model
    return {
        "id": run.training_run_id,
        "name": _name(run),
        "model": model,
        "steps": "" if run.steps is None else str(run.steps),
        "loss": _loss(run),
        "age": age(run.last_request_time),
        "status": _status(run),
        "owner": run.model_owner,
        "lora": f"rank {run.lora_rank}" if run.is_lora and run.lora_rank else yes_no(run.is_lora),
        "updated": ago(run.last_request_time),
        "checkpoint": last.checkpoint_id if last else NONE,
        "checkpoint_time": ago(last.time if last else None),
    }


def _name(run: tinkex.TrainingRun) -> str:
    """What its program called it: `user_metadata={"name": ...}`."""
    return (run.user_metadata or {}).get("name", "")


def _loss(run: tinkex.TrainingRun) -> str:
    return "" if run.last_loss is None else f"{run.last_loss:.4g}"


def _status(run: tinkex.TrainingRun) -> str:
    if run.status is not None:
        return run.status
    # Other services only say whether a run is lost.
    return "failed" if run.corrupted else NONE


def age(moment: datetime, *, now: datetime | None = None) -> str:
    """How long ago, in one short word: `12s`, `9m`, `3h`, `2d`."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = max(0.0, ((now or datetime.now(UTC)) - moment).total_seconds())
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def _last_checkpoint(checkpoint: tinkex.Checkpoint | None) -> str:
    return NONE if checkpoint is None else f"{checkpoint.tinker_path} ({ago(checkpoint.time)})"

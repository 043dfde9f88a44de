"""`tinkex run`: list and show training runs."""

from __future__ import annotations

import click

import tinkex
from tinkex.cli.completion import complete_runs
from tinkex.cli.output import (
    NONE,
    ago,
    as_json,
    examples,
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
    "model": "Model",
    "owner": "Owner",
    "lora": "LoRA",
    "updated": "Updated",
    "status": "Status",
    "checkpoint": "Last checkpoint",
    "checkpoint_time": "Saved",
}
DEFAULT_COLUMNS = "id,model,lora,updated,status"


@click.group("run")
def command() -> None:
    """List and show training runs."""


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
    """List training runs, newest first."""
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
            "Base model": run.base_model,
            "Owner": run.model_owner,
            "LoRA": yes_no(run.is_lora),
            "LoRA rank": NONE if run.lora_rank is None else str(run.lora_rank),
            "Status": _status(run),
            "Last request": ago(run.last_request_time),
            "Last checkpoint": _last_checkpoint(run.last_checkpoint),
            "Last sampler checkpoint": _last_checkpoint(run.last_sampler_checkpoint),
            **{f"Metadata {key}": value for key, value in (run.user_metadata or {}).items()},
        }
    )


def _cells(run: tinkex.TrainingRun) -> dict[str, str]:
    last = run.last_checkpoint
    return {
        "id": run.training_run_id,
        "model": run.base_model,
        "owner": run.model_owner,
        "lora": f"rank {run.lora_rank}" if run.is_lora and run.lora_rank else yes_no(run.is_lora),
        "updated": ago(run.last_request_time),
        "status": _status(run),
        "checkpoint": last.checkpoint_id if last else NONE,
        "checkpoint_time": ago(last.time if last else None),
    }


def _status(run: tinkex.TrainingRun) -> str:
    return "failed" if run.corrupted else "active"


def _last_checkpoint(checkpoint: tinkex.Checkpoint | None) -> str:
    return NONE if checkpoint is None else f"{checkpoint.tinker_path} ({ago(checkpoint.time)})"

"""`tinkex billing`: hourly usage, and storage used by checkpoints."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

import tinkex
from tinkex.cli.output import (
    NONE,
    as_json,
    counted,
    examples,
    show_json,
    show_table,
    write_csv,
    yes_no,
)
from tinkex.cli.output import size as shown_size
from tinkex.cli.service_options import admin_client, service_options

USAGE_COLUMNS = [
    "bucket_start",
    "bucket_end",
    "type",
    "base_model",
    "user_id",
    "user_name",
    "project_id",
    "session_id",
    "cached",
    "token_count",
    "count",
    "gigabyte_hours",
    "estimated_cost_usd",
    "effective_rate_usd_per_million_tokens",
    "effective_rate_usd_per_gigabyte_month",
]
#: Columns of the table; CSV and JSON have all.
USAGE_TABLE_COLUMNS = {
    "session_id": "Session",
    "bucket_start": "Hour",
    "type": "Type",
    "base_model": "Model",
    "cached": "Cached",
    "amount": "Amount",
    "estimated_cost_usd": "Cost (USD)",
    "user_name": "User",
    "project_id": "Project",
}


#: Usage from before the server had keys, or stored them with usage.
NO_KEY = "none (earlier usage)"


@click.group("billing")
def command() -> None:
    """Show usage and costs."""


@command.command(
    "usage",
    epilog=examples(
        "tinkex billing usage 2027-01-01 2027-02-01",
        "tinkex billing usage 2027-01-31T12:00:00Z 2027-01-31T13:00:00Z -f json",
        "tinkex billing usage 2027-01-01 2027-02-01 --csv usage.csv",
    ),
)
@click.argument("starting_on", metavar="START")
@click.argument("ending_before", metavar="END")
@click.option("--csv", "csv_path", metavar="FILE", help="Write rows as CSV; - is stdout.")
@click.option("--sessions-csv", metavar="FILE", help="Write the metadata of the sessions as CSV.")
@service_options
def usage(
    starting_on: str, ending_before: str, csv_path: str | None, sessions_csv: str | None
) -> None:
    """Show hourly usage from START until END (exclusive).

    Both are dates or times in UTC, such as 2027-01-31 or 2027-01-31T12:00:00Z.
    """
    if csv_path == sessions_csv == "-":
        raise click.UsageError("Only one of --csv and --sessions-csv can write to stdout.")
    answer = admin_client().get_billing_usage(starting_on, ending_before).result()
    rows = [_usage_row(event) for event in answer.data]
    if csv_path:
        write_csv(
            csv_path, USAGE_COLUMNS, [[row.get(name) for name in USAGE_COLUMNS] for row in rows]
        )
    if sessions_csv:
        write_csv(
            sessions_csv,
            ("session_id", "user_metadata"),
            [
                (session_id, json.dumps(session.user_metadata or {}, ensure_ascii=False))
                for session_id, session in answer.sessions.items()
            ],
        )
    if csv_path or sessions_csv:
        return
    if as_json():
        show_json(answer)
        return
    through = f"; costs are complete up to {answer.cost_data_through:%Y-%m-%d %H:%M} UTC" * bool(
        answer.cost_data_through
    )
    show_table(
        list(USAGE_TABLE_COLUMNS.values()),
        [[_usage_cells(row)[name] for name in USAGE_TABLE_COLUMNS] for row in rows],
        title=f"{counted(len(rows), 'entry', 'entries')}{through}",
    )


@command.command(
    "checkpoint-storage",
    epilog=examples(
        "tinkex billing checkpoint-storage",
        "tinkex billing checkpoint-storage --project-id PROJECT --csv -",
    ),
)
@click.option("--project-id", metavar="ID", help="Only this project.")
@click.option("--csv", "csv_path", metavar="FILE", help="Write rows as CSV; - is stdout.")
@service_options
def checkpoint_storage(project_id: str | None, csv_path: str | None) -> None:
    """Show current checkpoint storage by project and owner."""
    answer = admin_client().get_current_checkpoint_storage_usage(project_id).result()
    rows = [item.model_dump(mode="json") for item in answer.data]
    if csv_path:
        columns = list(tinkex.types.CurrentCheckpointStorageUsageItem.model_fields)
        write_csv(csv_path, columns, [[row[name] for name in columns] for row in rows])
    elif as_json():
        show_json(answer)
    else:
        show_table(
            ("Owner", "Project", "Checkpoints", "Size", "Cost per month (USD)"),
            [
                (
                    item.user_name or item.user_email or item.org_user_urn or NONE,
                    item.project_id or "",
                    str(item.checkpoint_count),
                    shown_size(item.size_bytes),
                    _cell(item.estimated_monthly_cost_usd),
                )
                for item in answer.data
            ],
        )


@command.command(
    "keys", epilog=examples("tinkex billing keys", "tinkex billing keys --days 7 --csv keys.csv")
)
@click.option(
    "--days",
    type=click.IntRange(1, 90),
    default=30,
    show_default=True,
    help="The last days, with today (UTC).",
)
@click.option("--csv", "csv_path", metavar="FILE", help="Write rows as CSV; - is stdout.")
@service_options
def keys(days: int, csv_path: str | None) -> None:
    """Show tokens by API key and base model, of a tinkex server with keys.

    With the key of an administrator, these are the keys of all owners. Revoked keys keep their names.
    """
    answer = admin_client().get_usage_by_key(days).result()
    if csv_path:
        columns = list(tinkex.types.UsageByKeyItem.model_fields)
        rows = [item.model_dump(mode="json") for item in answer.data]
        write_csv(csv_path, columns, [[row[name] for name in columns] for row in rows])
    elif as_json():
        show_json(answer)
    elif not answer.data:
        click.echo("No usage with keys in this time.", err=True)
    else:
        show_table(
            (
                *("Key", "Name", "Owner", "State", "Model"),
                *("Trained", "Sampled", "Prompts", "Cached", "Cost (USD)"),
            ),
            [
                (
                    NO_KEY if item.key_id is None else f"{item.hint}…",
                    item.name or "",
                    item.owner,
                    item.state or "",
                    item.base_model,
                    *(f"{one:,}" for one in (item.training, item.sampled)),
                    *(f"{one:,}" for one in (item.prefill, item.cached)),
                    _cell(item.estimated_cost_usd),
                )
                for item in answer.data
            ],
        )


def _usage_row(event: tinkex.types.BillingUsageEvent) -> dict[str, Any]:
    """The event as a flat row: the fields of `event_info` next to the others."""
    row = event.model_dump(mode="json")
    return {**row, **row.pop("event_info")}


def _usage_cells(row: dict[str, Any]) -> dict[str, str]:
    cells = {name: _cell(row.get(name)) for name in USAGE_TABLE_COLUMNS}
    cached = row.get("cached")
    hour = str(row["bucket_start"])[: len("2027-01-31T12:00")]
    return {
        **cells,
        "bucket_start": hour.replace("T", " ") if sys.stdout.isatty() else f"{hour}Z",
        "cached": "" if cached is None else yes_no(cached),
        "amount": _amount(row),
    }


def _amount(row: dict[str, Any]) -> str:
    for name, unit in (("token_count", "token"), ("count", "checkpoint")):
        if row.get(name) is not None:
            return counted(row[name], unit)
    return f"{row.get('gigabyte_hours', 0):.3f} GB-hours"


def _cell(value: Any) -> str:
    # Empty, not zero: a cost may not be known yet.
    return "" if value is None else str(value)

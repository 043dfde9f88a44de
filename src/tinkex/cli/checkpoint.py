"""`tinkex checkpoint`: saved weights, listed, looked at, published, kept and let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tinkex.cli.checkpoint_delete import delete
from tinkex.cli.checkpoint_files import download, push_hf
from tinkex.cli.failures import CommandFailed
from tinkex.cli.output import NONE, ago, as_json, plain, show_json, show_properties, show_table, yes
from tinkex.cli.output import size as shown_size
from tinkex.cli.remote import at_least, limited, pages, rest, talks_to_a_service

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.wire.checkpoints import Checkpoint

PAGE = 1000


@click.group("checkpoint")
def command() -> None:
    """List, download, publish and delete saved weights.

    A PATH is tinker://RUN/KIND/NAME, as `save_state` returns it and `list` shows it.
    """


command.add_command(delete)
command.add_command(download)
command.add_command(push_hf)


@command.command("list")
@click.option("--run-id", metavar="RUN", help="Only those of one training run.")
@limited
@talks_to_a_service
def list_(run_id: str | None, limit: int) -> None:
    """Show checkpoints, the latest first."""
    client = rest()

    def fetch(count: int, offset: int) -> tuple[list[Checkpoint], int]:
        page = client.list_user_checkpoints(limit=count, offset=offset).result()
        total = page.cursor.total_count if page.cursor else offset + len(page.checkpoints)
        return page.checkpoints, total

    if run_id is None:
        found, total = pages(fetch, limit=limit, page=PAGE, what="Checkpoints", quiet=as_json())
    else:
        found = client.list_checkpoints(run_id).result().checkpoints
        total = len(found)
        found = found[:limit] if limit else found
    if as_json():
        of_run = {} if run_id is None else {"run_id": run_id}
        show_json({**of_run, "checkpoints": found, "total": total, "shown": len(found)})
        return
    more = (
        f", {total - len(found)} more not shown (--limit 0 shows all)" if total > len(found) else ""
    )
    show_table(
        ("Path", "Type", "Size", "Public", "Saved", "Expires"),
        [
            (
                checkpoint.tinker_path,
                checkpoint.checkpoint_type,
                shown_size(checkpoint.size_bytes),
                yes(checkpoint.public),
                ago(checkpoint.time),
                "never" if checkpoint.expires_at is None else ago(checkpoint.expires_at),
            )
            for checkpoint in found
        ],
        title=f"{len(found)} checkpoints{more}",
    )


@command.command("info")
@click.argument("checkpoint_path", metavar="PATH")
@talks_to_a_service
def info(checkpoint_path: str) -> None:
    """Show one checkpoint."""
    client = rest()
    weights = client.get_weights_info_by_tinker_path(checkpoint_path)
    checkpoint = find(client, checkpoint_path)
    about = weights.result()
    if as_json():
        lora = {"is_lora": about.is_lora, "lora_rank": about.lora_rank}
        show_json({**plain(checkpoint), "base_model": about.base_model, **lora})
        return
    show_properties(
        {
            "Path": checkpoint.tinker_path,
            "Type": checkpoint.checkpoint_type,
            "Base model": about.base_model,
            "LoRA": yes(about.is_lora),
            "LoRA rank": NONE if about.lora_rank is None else str(about.lora_rank),
            "Size": shown_size(checkpoint.size_bytes),
            "Public": yes(checkpoint.public),
            "Saved": checkpoint.time.isoformat(),
            "Expires": "never"
            if checkpoint.expires_at is None
            else checkpoint.expires_at.isoformat(),
            **{f"Metadata {key}": value for key, value in (checkpoint.user_metadata or {}).items()},
        }
    )


def find(client: RestClient, path: str) -> Checkpoint:
    """What the list of its run says about a checkpoint."""
    from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath

    run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    for checkpoint in client.list_checkpoints(run_id).result().checkpoints:
        if checkpoint.tinker_path == path:
            return checkpoint
    raise CommandFailed(
        f"the run {run_id} has no checkpoint {path}.",
        hint=f"`tinkex checkpoint list --run-id {run_id}` shows those it has.",
    )


@command.command("publish")
@click.argument("checkpoint_path", metavar="PATH")
@talks_to_a_service
def publish(checkpoint_path: str) -> None:
    """Let everybody on the service read a checkpoint."""
    rest().publish_checkpoint_from_tinker_path(checkpoint_path).result()
    _done(checkpoint_path, "is published: everybody on the service can read it.", public=True)


@command.command("unpublish")
@click.argument("checkpoint_path", metavar="PATH")
@talks_to_a_service
def unpublish(checkpoint_path: str) -> None:
    """Make a published checkpoint yours alone again."""
    rest().unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    _done(checkpoint_path, "is yours alone again.", public=False)


@command.command("set-ttl")
@click.argument("checkpoint_path", metavar="PATH")
@click.option(
    "--ttl",
    type=int,
    callback=at_least(1),
    metavar="SECONDS",
    help="Delete it after this long.",
)
@click.option("--remove", is_flag=True, help="Keep it for good.")
@talks_to_a_service
def set_ttl(checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Say how long a checkpoint is kept, from now on."""
    if (ttl is None) != remove:
        raise click.UsageError("Give either --ttl SECONDS or --remove.")
    rest().set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    words = "is kept for good." if remove else f"will be deleted in {ttl} seconds."
    _done(checkpoint_path, words, ttl_seconds=ttl)


def _done(path: str, words: str, **state: bool | int | None) -> None:
    if as_json():
        show_json({"tinker_path": path, **state})
    else:
        click.echo(f"{path} {words}", err=True)

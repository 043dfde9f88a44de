"""`tinkex checkpoint`: saved weights, listed, looked at, published, kept and let go."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import (
    NONE,
    ago,
    as_json,
    plain,
    show_json,
    show_properties,
    show_table,
    yes_no,
)
from tinkex.cli.output import size as shown_size
from tinkex.cli.service_options import (
    fetch_pages,
    limit_option,
    minimum,
    progress_bar,
    rest_client,
    service_options,
)

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.wire.checkpoints import Checkpoint

PAGE_SIZE = 1000
MAX_CONCURRENT_DELETES = 32
TYPES = ("training", "sampler", "external")


@click.group("checkpoint")
def command() -> None:
    """List, download, publish and delete saved weights.

    A PATH is tinker://RUN/KIND/NAME, as `save_state` returns it and `list` shows it.
    """


def _parse_date(ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a date. Write 2027-01-31 or 2027-01-31T12:00:00+00:00."
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _parse_type(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    # The option is free text, as in the official client; the kinds of paths are taken as well.
    from tinkex.wire.checkpoints import KINDS

    kind = KINDS.get(text or "", text)
    if kind is not None and kind not in TYPES:
        raise click.BadParameter(f"{text!r} is no type. There are: {', '.join(TYPES)}.")
    return kind


@command.command("delete")
@click.argument("checkpoint_paths", metavar="[PATH]...", nargs=-1)
@click.option("--run-id", metavar="RUN", help="All checkpoints of a training run.")
@click.option("--type", "kind", callback=_parse_type, help=f"Of these, only {', '.join(TYPES)}.")
@click.option("--before", callback=_parse_date, metavar="DATE", help="Only those saved before.")
@click.option("--after", callback=_parse_date, metavar="DATE", help="Only those saved at or after.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@service_options
def delete(
    checkpoint_paths: tuple[str, ...],
    run_id: str | None,
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
    yes: bool,
) -> None:
    """Delete checkpoints, by their PATHs or all of a run. There is no way back."""
    if bool(checkpoint_paths) == bool(run_id):
        raise click.UsageError("Give either PATHs or --run-id.")
    if not run_id and (kind or before or after):
        raise click.UsageError("--type, --before and --after choose among those of a --run-id.")
    client = rest_client()
    if run_id:
        found = [
            checkpoint
            for checkpoint in client.list_checkpoints(run_id).result().checkpoints
            if (kind is None or checkpoint.checkpoint_type == kind)
            and (before is None or checkpoint.time < before)
            and (after is None or checkpoint.time >= after)
        ]
        paths = [checkpoint.tinker_path for checkpoint in found]
    else:
        paths = list(dict.fromkeys(checkpoint_paths))
        found = [] if yes else _look_up(client, paths)
    if not paths:
        _report(0, [])
        return
    if not yes and not _confirmed(paths, found):
        raise CommandFailed("nothing was deleted.")
    failed = _delete_all(client, paths)
    _report(len(paths) - len(failed), failed)
    if failed:
        raise click.exceptions.Exit(1)


def _look_up(client: RestClient, paths: Iterable[str]) -> list[Checkpoint]:
    """Sizes to show before asking; a path that is not there shows up when it is deleted."""
    from tinkex.client.errors import NotFoundError
    from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath

    wanted = {path: ParsedCheckpointTinkerPath.from_tinker_path(path) for path in paths}
    found: list[Checkpoint] = []
    for run_id in dict.fromkeys(parsed.training_run_id for parsed in wanted.values()):
        try:
            of_run = client.list_checkpoints(run_id).result().checkpoints
        except NotFoundError:
            continue
        found += [checkpoint for checkpoint in of_run if checkpoint.tinker_path in wanted]
    return found


def _confirmed(paths: list[str], found: list[Checkpoint]) -> bool:
    sizes = {checkpoint.tinker_path: checkpoint.size_bytes for checkpoint in found}
    for path in paths:
        click.echo(f"  {path}  {shown_size(sizes.get(path))}", err=True)
    total = sum(size or 0 for size in sizes.values())
    what = "1 checkpoint" if len(paths) == 1 else f"{len(paths)} checkpoints"
    return click.confirm(f"Delete {what} ({shown_size(total)}) for good?", err=True)


def _delete_all(client: RestClient, paths: list[str]) -> list[tuple[str, str]]:
    """Delete, some at a time; what could not be deleted comes back with the reason."""
    failed: list[tuple[str, str]] = []
    waiting = list(reversed(paths))
    running: dict[concurrent.futures.Future[None], str] = {}
    with progress_bar("Deleting", quiet=as_json()) as show:
        while waiting or running:
            while waiting and len(running) < MAX_CONCURRENT_DELETES:
                path = waiting.pop()
                try:
                    running[client.delete_checkpoint_from_tinker_path(path)] = path
                except ValueError as error:  # not a path at all
                    failed.append((path, str(error)))
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                path = running.pop(future)
                if (reason := future.exception()) is not None:
                    failed.append((path, str(reason)))
            show(len(paths) - len(waiting) - len(running), len(paths))
    return failed


def _report(deleted: int, failed: list[tuple[str, str]]) -> None:
    if as_json():
        show_json(
            {
                "deleted_count": deleted,
                "failed": [{"tinker_path": path, "error": error} for path, error in failed],
            }
        )
        return
    click.echo(f"Deleted {deleted} checkpoints.", err=True)
    for path, error in failed:
        click.echo(f"error: {path} is still there: {error}", err=True)


@command.command("download")
@click.argument("checkpoint_path", metavar="PATH")
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to make it in.  [default: here]",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
@service_options
def download(checkpoint_path: str, output: Path | None, force: bool) -> None:
    """Download the files of a checkpoint into a folder of their own.

    A download that was cut off goes on where it stopped.
    """
    target = (output or Path()) / folder_name(checkpoint_path)
    folder = _downloaded(rest_client(), checkpoint_path, target, force=force)
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if as_json():
        show_json(
            {
                "checkpoint_path": checkpoint_path,
                "destination": str(folder),
                "file_size_bytes": total,
            }
        )
    else:
        click.echo(f"{folder} ({shown_size(total)})", err=True)


def folder_name(path: str) -> str:
    """`<run>_<kind>_<name>`, in letters that every file system takes."""
    from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    name = f"{parsed.training_run_id}_{parsed.checkpoint_id}"
    return re.sub(r"[^\w.+=-]+", "_", name)


def _downloaded(client: RestClient, path: str, target: Path, *, force: bool) -> Path:
    from tinkex.client.files.checkpoint_download import download_checkpoint

    if target.exists() and not force:
        raise CommandFailed(
            f"{target} is there already.", hint="Add --force to replace it, or choose --output."
        )
    with progress_bar(f"Downloading {target.name}", quiet=as_json()) as show:
        return download_checkpoint(path, target, rest=client, overwrite=force, progress=show)


@command.command("info")
@click.argument("checkpoint_path", metavar="PATH")
@service_options
def info(checkpoint_path: str) -> None:
    """Show one checkpoint."""
    client = rest_client()
    weights = client.get_weights_info_by_tinker_path(checkpoint_path)
    checkpoint = find_checkpoint(client, checkpoint_path)
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
            "LoRA": yes_no(about.is_lora),
            "LoRA rank": NONE if about.lora_rank is None else str(about.lora_rank),
            "Size": shown_size(checkpoint.size_bytes),
            "Public": yes_no(checkpoint.public),
            "Saved": checkpoint.time.isoformat(),
            "Expires": "never"
            if checkpoint.expires_at is None
            else checkpoint.expires_at.isoformat(),
            **{f"Metadata {key}": value for key, value in (checkpoint.user_metadata or {}).items()},
        }
    )


def find_checkpoint(client: RestClient, path: str) -> Checkpoint:
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


@command.command("list")
@click.option("--run-id", metavar="RUN", help="Only those of one training run.")
@limit_option
@service_options
def list_(run_id: str | None, limit: int) -> None:
    """Show checkpoints, the latest first."""
    client = rest_client()

    def fetch(count: int, offset: int) -> tuple[list[Checkpoint], int]:
        page = client.list_user_checkpoints(limit=count, offset=offset).result()
        total = page.cursor.total_count if page.cursor else offset + len(page.checkpoints)
        return page.checkpoints, total

    if run_id is None:
        found, total = fetch_pages(
            fetch, limit=limit, page=PAGE_SIZE, what="Checkpoints", quiet=as_json()
        )
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
                yes_no(checkpoint.public),
                ago(checkpoint.time),
                "never" if checkpoint.expires_at is None else ago(checkpoint.expires_at),
            )
            for checkpoint in found
        ],
        title=f"{len(found)} checkpoints{more}",
    )


@command.command("publish")
@click.argument("checkpoint_path", metavar="PATH")
@service_options
def publish(checkpoint_path: str) -> None:
    """Let everybody on the service read a checkpoint."""
    rest_client().publish_checkpoint_from_tinker_path(checkpoint_path).result()
    _report_change(
        checkpoint_path, "is published: everybody on the service can read it.", public=True
    )


@command.command("push-hf")
@click.argument("checkpoint_path", metavar="PATH")
@click.option("--repo", "-r", metavar="NAME", help="USER/NAME on the hub.  [default: made from it]")
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option("--revision", metavar="BRANCH", help="Where in it.  [default: made from PATH]")
@click.option("--commit-message", metavar="TEXT")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--allow-pattern", multiple=True, metavar="GLOB", help="Only such files.")
@click.option("--ignore-pattern", multiple=True, metavar="GLOB", help="No such files.")
@click.option("--no-model-card", is_flag=True, help="Don't write a README.md.")
@service_options
def push_hf(
    checkpoint_path: str,
    repo: str | None,
    public: bool,
    revision: str | None,
    commit_message: str | None,
    create_pr: bool,
    allow_pattern: tuple[str, ...],
    ignore_pattern: tuple[str, ...],
    no_model_card: bool,
) -> None:
    """Put an adapter on the Hugging Face hub, with a model card.

    Needs a login there (`hf auth login`, or HF_TOKEN).
    """
    import tempfile

    from tinkex.client.files.huggingface import push_to_hub

    with tempfile.TemporaryDirectory() as work:
        target = Path(work) / folder_name(checkpoint_path)
        folder = _downloaded(rest_client(), checkpoint_path, target, force=False)
        pushed = push_to_hub(
            checkpoint_path,
            folder,
            repo=repo,
            revision=revision,
            public=public,
            commit_message=commit_message,
            create_pr=create_pr,
            allow_patterns=allow_pattern or None,
            ignore_patterns=ignore_pattern or None,
            model_card=not no_model_card,
        )
    if as_json():
        show_json(
            {
                "checkpoint_path": checkpoint_path,
                "repo_id": pushed.repo_id,
                "revision": pushed.revision,
                "url": pushed.url,
            }
        )
    else:
        click.echo(pushed.url)


@command.command("set-ttl")
@click.argument("checkpoint_path", metavar="PATH")
@click.option(
    "--ttl",
    type=int,
    callback=minimum(1),
    metavar="SECONDS",
    help="Delete it after this long.",
)
@click.option("--remove", is_flag=True, help="Keep it for good.")
@service_options
def set_ttl(checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Say how long a checkpoint is kept, from now on."""
    if (ttl is None) != remove:
        raise click.UsageError("Give either --ttl SECONDS or --remove.")
    rest_client().set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    words = "is kept for good." if remove else f"will be deleted in {ttl} seconds."
    _report_change(checkpoint_path, words, ttl_seconds=ttl)


@command.command("unpublish")
@click.argument("checkpoint_path", metavar="PATH")
@service_options
def unpublish(checkpoint_path: str) -> None:
    """Make a published checkpoint yours alone again."""
    rest_client().unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    _report_change(checkpoint_path, "is yours alone again.", public=False)


def _report_change(path: str, words: str, **state: bool | int | None) -> None:
    if as_json():
        show_json({"tinker_path": path, **state})
    else:
        click.echo(f"{path} {words}", err=True)

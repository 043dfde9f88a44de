"""`tinkex checkpoint`: list, show, download, publish, expire and delete saved weights."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

import tinkex
from tinkex.cli.completion import complete_checkpoints, complete_runs
from tinkex.cli.errors import CommandFailed, as_command_failure
from tinkex.cli.output import (
    NONE,
    ago,
    ago_exact,
    as_json,
    counted,
    examples,
    plain,
    report,
    show_json,
    show_properties,
    show_table,
    yes_no,
)
from tinkex.cli.output import size as shown_size
from tinkex.cli.service_options import (
    fetch_pages,
    limit_option,
    list_title,
    minimum,
    progress_bar,
    rest_client,
    service_options,
)

PAGE_SIZE = 1000
MAX_CONCURRENT_DELETES = 32
TYPES = ("training", "sampler", "external")

path_argument = click.argument(
    "checkpoint_path", metavar="PATH", shell_complete=complete_checkpoints
)


@click.group("checkpoint")
def command() -> None:
    """List, download, publish and delete saved weights.

    A PATH is tinker://RUN/KIND/NAME, as returned by `save_state` and shown by `list`.
    """


def _parse_date(ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a date. Use 2027-01-31 or 2027-01-31T12:00:00+00:00."
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _parse_type(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    # Free text, as in the official client; the KIND of a path is accepted too.
    from tinkex.wire.checkpoints import KINDS

    kind = KINDS.get(text or "", text)
    if kind is not None and kind not in TYPES:
        raise click.BadParameter(
            f"{text!r} is not a checkpoint type. Choose from: {', '.join(TYPES)}."
        )
    return kind


@command.command(
    "delete",
    epilog=examples(
        "tinkex checkpoint delete tinker://RUN/weights/first",
        "tinkex checkpoint delete --run-id RUN --type sampler --before 2027-01-31",
        "tinkex checkpoint delete --run-id RUN --yes",
    ),
)
@click.argument(
    "checkpoint_paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_checkpoints
)
@click.option(
    "--run-id",
    metavar="RUN",
    shell_complete=complete_runs,
    help="All checkpoints of a training run.",
)
@click.option("--type", "kind", callback=_parse_type, help=f"Only this type: {', '.join(TYPES)}.")
@click.option(
    "--before", callback=_parse_date, metavar="DATE", help="Only those saved before this date."
)
@click.option(
    "--after", callback=_parse_date, metavar="DATE", help="Only those saved on or after this date."
)
@click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation.")
@service_options
def delete(
    checkpoint_paths: tuple[str, ...],
    run_id: str | None,
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
    yes: bool,
) -> None:
    """Delete checkpoints by PATH, or those of a run. This cannot be undone."""
    if bool(checkpoint_paths) == bool(run_id):
        raise click.UsageError("Give either PATHs or --run-id.")
    if not run_id and (kind or before or after):
        raise click.UsageError("--type, --before and --after can only be used with --run-id.")
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


def _look_up(client: tinkex.RestClient, paths: Iterable[str]) -> list[tinkex.Checkpoint]:
    """The existing checkpoints among `paths`; missing ones are reported when they are deleted."""
    wanted = {path: tinkex.ParsedCheckpointTinkerPath.from_tinker_path(path) for path in paths}
    found: list[tinkex.Checkpoint] = []
    for run_id in dict.fromkeys(parsed.training_run_id for parsed in wanted.values()):
        try:
            of_run = client.list_checkpoints(run_id).result().checkpoints
        except tinkex.NotFoundError:
            continue
        found += [checkpoint for checkpoint in of_run if checkpoint.tinker_path in wanted]
    return found


def _confirmed(paths: list[str], found: list[tinkex.Checkpoint]) -> bool:
    sizes = {checkpoint.tinker_path: checkpoint.size_bytes for checkpoint in found}
    for path in paths:
        click.echo(f"  {path}  {shown_size(sizes.get(path))}", err=True)
    total = sum(size or 0 for size in sizes.values())
    what = counted(len(paths), "checkpoint")
    return click.confirm(f"Delete {what} ({shown_size(total)}) permanently?", err=True)


def _delete_all(client: tinkex.RestClient, paths: list[str]) -> list[tuple[str, str]]:
    """Delete concurrently; return the paths that could not be deleted, with the reasons."""
    failed: list[tuple[str, str]] = []
    waiting = list(reversed(paths))
    running: dict[concurrent.futures.Future[None], str] = {}
    with progress_bar("Deleting") as show:
        while waiting or running:
            while waiting and len(running) < MAX_CONCURRENT_DELETES:
                path = waiting.pop()
                try:
                    running[client.delete_checkpoint_from_tinker_path(path)] = path
                except ValueError as error:  # not a valid path
                    failed.append((path, str(error)))
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                path = running.pop(future)
                if (reason := future.exception()) is not None:
                    failure = isinstance(reason, Exception) and as_command_failure(reason)
                    failed.append((path, failure.message if failure else str(reason)))
            show(len(paths) - len(waiting) - len(running), len(paths))
    return failed


def _report(deleted: int, failed: list[tuple[str, str]]) -> None:
    reasons = [{"tinker_path": path, "error": error} for path, error in failed]
    lines = [f"Deleted {counted(deleted, 'checkpoint')}."]
    lines += [f"error: {path} was not deleted: {error}" for path, error in failed]
    report("\n".join(lines), {"deleted_count": deleted, "failed": reasons})


@command.command(
    "download",
    epilog=examples(
        "tinkex checkpoint download tinker://RUN/weights/final",
        "tinkex checkpoint download tinker://RUN/weights/final -o ~/adapters",
    ),
)
@path_argument
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    help="Parent folder of the download.  [default: the current folder]",
)
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@service_options
def download(checkpoint_path: str, output: Path | None, force: bool) -> None:
    """Download the files of a checkpoint into a new folder.

    An interrupted download is resumed.
    """
    target = (output or Path()) / folder_name(checkpoint_path)
    folder = _download(rest_client(), checkpoint_path, target, force=force)
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    fields = {"checkpoint_path": checkpoint_path, "destination": str(folder)}
    report(f"{folder} ({shown_size(total)})", {**fields, "file_size_bytes": total})


def folder_name(path: str) -> str:
    """`<run>_<kind>_<name>`, with characters that every file system accepts."""
    parsed = tinkex.ParsedCheckpointTinkerPath.from_tinker_path(path)
    name = f"{parsed.training_run_id}_{parsed.checkpoint_id}"
    return re.sub(r"[^\w.+=-]+", "_", name)


def _download(client: tinkex.RestClient, path: str, target: Path, *, force: bool) -> Path:
    if target.exists() and not force:
        raise CommandFailed(
            f"{target} already exists.", hint="Add --force to replace it, or use --output."
        )
    with progress_bar(f"Downloading {target.name}") as show:
        return tinkex.download_checkpoint(path, target, rest=client, overwrite=force, progress=show)


@command.command(
    "info",
    epilog=examples(
        "tinkex checkpoint info tinker://RUN/weights/final",
        "tinkex checkpoint info -v tinker://RUN/weights/final    # exact times",
    ),
)
@path_argument
@service_options
def info(checkpoint_path: str) -> None:
    """Show one checkpoint."""
    client = rest_client()
    weights = client.get_weights_info_by_tinker_path(checkpoint_path)
    checkpoint = find_checkpoint(client, checkpoint_path)
    weights_info = weights.result()
    if as_json():
        lora = {"is_lora": weights_info.is_lora, "lora_rank": weights_info.lora_rank}
        show_json({**plain(checkpoint), "base_model": weights_info.base_model, **lora})
        return
    show_properties(
        {
            "Path": checkpoint.tinker_path,
            "Type": checkpoint.checkpoint_type,
            "Base model": weights_info.base_model,
            "LoRA": yes_no(weights_info.is_lora),
            "LoRA rank": NONE if weights_info.lora_rank is None else str(weights_info.lora_rank),
            "Size": shown_size(checkpoint.size_bytes),
            "Public": yes_no(checkpoint.public),
            "Saved": ago_exact(checkpoint.time),
            "Expires": ago_exact(checkpoint.expires_at) if checkpoint.expires_at else "never",
            **{f"Metadata {key}": value for key, value in (checkpoint.user_metadata or {}).items()},
        }
    )


def find_checkpoint(client: tinkex.RestClient, path: str) -> tinkex.Checkpoint:
    """Find a checkpoint in the list of its run."""
    run_id = tinkex.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    for checkpoint in client.list_checkpoints(run_id).result().checkpoints:
        if checkpoint.tinker_path == path:
            return checkpoint
    raise CommandFailed(
        f"run {run_id} has no checkpoint {path}.",
        hint=f"`tinkex checkpoint list --run-id {run_id}` lists its checkpoints.",
    )


@command.command(
    "list",
    epilog=examples(
        "tinkex checkpoint list",
        "tinkex checkpoint list --run-id RUN",
        "tinkex checkpoint list --limit 0 -f json",
    ),
)
@click.option(
    "--run-id",
    metavar="RUN",
    shell_complete=complete_runs,
    help="Only those of this training run.",
)
@limit_option
@service_options
def list_(run_id: str | None, limit: int) -> None:
    """List checkpoints, newest first."""
    client = rest_client()

    def fetch(count: int, offset: int) -> tuple[list[tinkex.Checkpoint], int]:
        page = client.list_user_checkpoints(limit=count, offset=offset).result()
        total = page.cursor.total_count if page.cursor else offset + len(page.checkpoints)
        return page.checkpoints, total

    if run_id is None:
        found, total = fetch_pages(fetch, limit=limit, page=PAGE_SIZE, what="Checkpoints")
    else:
        found = client.list_checkpoints(run_id).result().checkpoints
        total = len(found)
        found = found[:limit] if limit else found
    if as_json():
        of_run = {} if run_id is None else {"run_id": run_id}
        show_json({**of_run, "checkpoints": found, "total": total, "shown": len(found)})
        return
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
        title=list_title(len(found), total, "checkpoint"),
    )


@command.command(
    "publish",
    epilog=examples(
        "tinkex checkpoint publish tinker://RUN/sampler_weights/final",
    ),
)
@path_argument
@service_options
def publish(checkpoint_path: str) -> None:
    """Make a checkpoint readable by everyone on the service."""
    rest_client().publish_checkpoint_from_tinker_path(checkpoint_path).result()
    _report_change(checkpoint_path, "is now readable by everyone on the service.", public=True)


@command.command(
    "push-hf",
    epilog=examples(
        "tinkex checkpoint push-hf tinker://RUN/sampler_weights/final",
        "tinkex checkpoint push-hf tinker://RUN/weights/final --repo me/pirate",
    ),
)
@path_argument
@click.option(
    "--repo", "-r", metavar="NAME", help="USER/NAME on the hub.  [default: based on PATH]"
)
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option("--revision", metavar="BRANCH", help="Branch to push to.  [default: based on PATH]")
@click.option("--commit-message", metavar="TEXT")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--allow-pattern", multiple=True, metavar="GLOB", help="Only matching files.")
@click.option("--ignore-pattern", multiple=True, metavar="GLOB", help="Skip matching files.")
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
    """Push an adapter to the Hugging Face hub, with a model card.

    Requires a login there (`hf auth login`, or HF_TOKEN).
    """
    import tempfile

    from tinkex.client.files.huggingface import push_to_hub

    with tempfile.TemporaryDirectory() as work:
        target = Path(work) / folder_name(checkpoint_path)
        folder = _download(rest_client(), checkpoint_path, target, force=False)
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
    report(pushed.url, {"checkpoint_path": checkpoint_path, **asdict(pushed)}, err=False)


@command.command(
    "set-ttl",
    epilog=examples(
        "tinkex checkpoint set-ttl tinker://RUN/weights/final --ttl 86400",
        "tinkex checkpoint set-ttl tinker://RUN/weights/final --remove",
    ),
)
@path_argument
@click.option(
    "--ttl", type=int, callback=minimum(1), metavar="SECONDS", help="Delete it after this time."
)
@click.option("--remove", is_flag=True, help="Never delete it.")
@service_options
def set_ttl(checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Set or remove the expiry of a checkpoint, counted from now."""
    if (ttl is None) != remove:
        raise click.UsageError("Give either --ttl SECONDS or --remove.")
    rest_client().set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    words = "no longer expires." if remove else f"will be deleted in {counted(ttl or 0, 'second')}."
    _report_change(checkpoint_path, words, ttl_seconds=ttl)


@command.command(
    "unpublish",
    epilog=examples(
        "tinkex checkpoint unpublish tinker://RUN/sampler_weights/final",
    ),
)
@path_argument
@service_options
def unpublish(checkpoint_path: str) -> None:
    """Make a published checkpoint private again."""
    rest_client().unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    _report_change(checkpoint_path, "is private again.", public=False)


def _report_change(path: str, words: str, **state: bool | int | None) -> None:
    report(f"{path} {words}", {"tinker_path": path, **state})

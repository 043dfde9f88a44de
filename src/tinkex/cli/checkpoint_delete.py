"""`tinkex checkpoint delete`: many at once, asked about first, every failure reported."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from tinkex.cli.failures import CommandFailed
from tinkex.cli.output import as_json, show_json
from tinkex.cli.output import size as shown_size
from tinkex.cli.remote import counting, rest, talks_to_a_service

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.wire.checkpoints import Checkpoint

AT_ONCE = 32
TYPES = ("training", "sampler", "external")


def _moment(ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a date. Write 2027-01-31 or 2027-01-31T12:00:00+00:00."
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _type(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    # The option is free text, as in the official client; the kinds of paths are taken as well.
    from tinkex.wire.checkpoints import KINDS

    kind = KINDS.get(text or "", text)
    if kind is not None and kind not in TYPES:
        raise click.BadParameter(f"{text!r} is no type. There are: {', '.join(TYPES)}.")
    return kind


@click.command("delete")
@click.argument("checkpoint_paths", metavar="[PATH]...", nargs=-1)
@click.option("--run-id", metavar="RUN", help="All checkpoints of a training run.")
@click.option("--type", "kind", callback=_type, help=f"Of these, only {', '.join(TYPES)}.")
@click.option("--before", callback=_moment, metavar="DATE", help="Only those saved before.")
@click.option("--after", callback=_moment, metavar="DATE", help="Only those saved at or after.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@talks_to_a_service
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
    client = rest()
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
        found = [] if yes else _known(client, paths)
    if not paths:
        _report(0, [])
        return
    if not yes and not _confirmed(paths, found):
        raise CommandFailed("nothing was deleted.")
    failed = _delete_all(client, paths)
    _report(len(paths) - len(failed), failed)
    if failed:
        raise click.exceptions.Exit(1)


def _known(client: RestClient, paths: Iterable[str]) -> list[Checkpoint]:
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
    with counting("Deleting", quiet=as_json()) as show:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
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

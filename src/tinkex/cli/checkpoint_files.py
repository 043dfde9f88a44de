"""`tinkex checkpoint download` and `push-hf`: the files of saved weights, here or on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.failures import CommandFailed
from tinkex.cli.output import as_json, show_json
from tinkex.cli.output import size as shown_size
from tinkex.cli.remote import counting, rest, talks_to_a_service

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient


@click.command("download")
@click.argument("checkpoint_path", metavar="PATH")
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to make it in.  [default: here]",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
@talks_to_a_service
def download(checkpoint_path: str, output: Path | None, force: bool) -> None:
    """Download the files of a checkpoint into a folder of their own.

    A download that was cut off goes on where it stopped.
    """
    target = (output or Path()) / folder_name(checkpoint_path)
    folder = _downloaded(rest(), checkpoint_path, target, force=force)
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
    with counting(f"Downloading {target.name}", quiet=as_json()) as show:
        return download_checkpoint(path, target, rest=client, overwrite=force, progress=show)


@click.command("push-hf")
@click.argument("checkpoint_path", metavar="PATH")
@click.option("--repo", "-r", metavar="NAME", help="USER/NAME on the hub.  [default: made from it]")
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option("--revision", metavar="BRANCH", help="Where in it.  [default: made from PATH]")
@click.option("--commit-message", metavar="TEXT")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--allow-pattern", multiple=True, metavar="GLOB", help="Only such files.")
@click.option("--ignore-pattern", multiple=True, metavar="GLOB", help="No such files.")
@click.option("--no-model-card", is_flag=True, help="Don't write a README.md.")
@talks_to_a_service
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
        folder = _downloaded(rest(), checkpoint_path, target, force=False)
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

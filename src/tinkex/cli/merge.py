"""`tinkex merge ADAPTER OUT`: a full model from a base model and a saved adapter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed, needs


@click.command("merge")
@click.argument("adapter", metavar="ADAPTER")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--base",
    metavar="NAME|FOLDER",
    help="The base model.  [default: the one the adapter names]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Numbers of the merged model.  [default: the base model's]",
)
@click.option(
    "--data",
    metavar="DIR",
    help="The server's data folder, for a tinker:// path.  [default: ~/.local/share/tinkex]",
)
def command(adapter: str, out: Path, base: str | None, dtype: str | None, data: str | None) -> None:
    """Add ADAPTER into its base model and write a full Hugging Face model to OUT.

    ADAPTER is a checkpoint folder (adapter_config.json and adapter_model.safetensors), or a
    tinker:// path of a checkpoint in a server's data folder.
    """
    try:
        from tinkex.engine.adapters.merge import merge
        from tinkex.engine.device import DTYPES
        from tinkex.engine.model.base_model import UnsupportedModel
        from tinkex.models.resolve import ModelNotFound, resolve
        from tinkex.models.weight_files import RefusedFolder
        from tinkex.wire.errors import UserFailure
    except ModuleNotFoundError as error:
        raise needs(error, "`tinkex merge`", "engine") from error
    try:
        folder = from_server(adapter, data) if adapter.startswith("tinker://") else Path(adapter)
        source = resolve(base or named_base(folder))
        merged = merge(source.folder, folder, out, None if dtype is None else DTYPES[dtype])
    except (UserFailure, UnsupportedModel, RefusedFolder, ModelNotFound, FileExistsError) as error:
        raise CommandFailed(str(error)) from error
    click.echo(f"{out}: {source.name} with {folder.name} in it, {merged.dtype}, {merged.size_bytes / 1e6:.1f} MB.")  # fmt: skip
    if merged.untied:
        click.echo(
            "The adapter changed the output projection, which the base model shares with its input "
            "embeddings: the merged model has one of each (tie_word_embeddings is false)."
        )


def named_base(folder: Path) -> str:
    """The base model an adapter says it was trained on."""
    file = folder / "adapter_config.json"
    try:
        name = json.loads(file.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise CommandFailed(
            f"{folder} is not a checkpoint: {file.name} cannot be read.",
            hint="Name a folder with adapter_config.json and adapter_model.safetensors.",
        ) from error
    if not name:
        raise CommandFailed(f"{folder} does not say its base model.", hint="Add --base NAME.")
    return str(name)


def from_server(path: str, data: str | None) -> Path:
    """The folder behind a tinker:// path of a server on this machine."""
    try:
        from tinkex.server.settings import Settings
        from tinkex.server.store import DatabaseRefused
        from tinkex.server.store.folder_lock import database_file, open_shared_store
    except ModuleNotFoundError as error:
        raise needs(error, "a tinker:// path", "all") from error
    settings = Settings.from_sources({"data": data})
    database = database_file(settings.db_url)
    if not settings.folder.is_dir() or (database is not None and not database.is_file()):
        raise CommandFailed(
            f"{settings.folder} is no server's data folder.", hint="Say which with --data DIR."
        )
    try:
        store = open_shared_store(settings)
    except DatabaseRefused as error:
        raise CommandFailed(str(error)) from error

    async def look() -> Path | None:
        version = await store.checkpoints.find(path, readers=["local"])
        return None if version is None else Path(await store.checkpoints.open(version.version_id))

    try:
        folder = asyncio.run(look())
    finally:
        store.close()
    if folder is None:
        raise CommandFailed(
            f"there is no checkpoint {path} in {settings.folder}.",
            hint="Say which data folder with --data DIR.",
        )
    return folder

"""`tinkex merge ADAPTER OUT`: merge a saved adapter into its base model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from tinkex.cli.completion import complete_adapters
from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.output import examples, report
from tinkex.wire.text_format import format_bytes

#: Characters of the name of a base model; of a config, bytes. Anyone may have written an adapter.
MAX_NAME, MAX_CONFIG_BYTES = 500, 4 << 20


@click.command(
    "merge",
    epilog=examples(
        "tinkex merge tinker://RUN/weights/final merged",
        "tinkex merge ./adapter merged --base ~/models/Qwen3-0.6B --dtype bfloat16",
    ),
)
@click.argument("adapter", metavar="ADAPTER", shell_complete=complete_adapters)
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--base",
    metavar="NAME|FOLDER",
    help="The base model.  [default: the one named by the adapter]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Data type of the merged model.  [default: that of the base model]",
)
@click.option(
    "--data",
    metavar="DIR",
    help="The server's data folder, for a tinker:// path.  [default: ~/.local/share/tinkex]",
)
def command(adapter: str, out: Path, base: str | None, dtype: str | None, data: str | None) -> None:
    """Merge ADAPTER into its base model and write a full Hugging Face model to OUT.

    ADAPTER is a checkpoint folder (adapter_config.json and adapter_model.safetensors), or a
    tinker:// path of a checkpoint in a server's data folder.
    """
    from tinkex.wire.errors import UserFailure

    # Before the other imports, which take seconds.
    try:
        folder = from_server(adapter, data) if adapter.startswith("tinker://") else Path(adapter)
    except UserFailure as error:
        raise CommandFailed(str(error)) from error
    named = base or named_base(folder)
    try:
        from tinkex.engine.adapters.merge import merge
        from tinkex.engine.device import DTYPES
        from tinkex.engine.model.unsupported import UnsupportedModel
        from tinkex.models.resolve import ModelNotFound, resolve
        from tinkex.models.weight_file_checks import RefusedFolder
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex merge`", "engine") from error
    try:
        source = resolve(named)
        merged = merge(source.folder, folder, out, None if dtype is None else DTYPES[dtype])
    except (UserFailure, UnsupportedModel, RefusedFolder, ModelNotFound, FileExistsError) as error:
        raise CommandFailed(str(error)) from error
    size = format_bytes(merged.size_bytes)
    words = f"{out}: {source.name} merged with {adapter}, {merged.dtype}, {size}."
    if merged.untied:
        words += (
            "\nThe adapter changes the output projection, which the base model shares with its "
            "input embeddings. The merged model has both separately (tie_word_embeddings is false)."
        )
    fields = {
        "destination": str(out),
        "adapter": adapter,
        "base_model": source.name,
        "dtype": merged.dtype,
        "size_bytes": merged.size_bytes,
        "untied": merged.untied,
    }
    report(words, fields, err=False)


def named_base(folder: Path) -> str:
    """The base model that an adapter names."""
    name = adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise CommandFailed(f"{folder} does not name its base model.", hint="Add --base NAME.")
    return name


def adapter_config(folder: Path) -> dict[str, Any]:
    """The checked config of an adapter: its rank is a number, its modules are names."""
    file = folder / "adapter_config.json"
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError("too large")
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CommandFailed(
            f"{folder} is not a checkpoint: {file.name} cannot be read.",
            hint="Give a folder with adapter_config.json and adapter_model.safetensors.",
        ) from error
    modules = config.get("target_modules") if isinstance(config, dict) else None
    names = modules if isinstance(modules, list) else [] if modules is None else [modules]
    if (
        not isinstance(config, dict)
        or not isinstance(config.get("r"), int)
        or not all(isinstance(name, str) for name in names)
    ):
        raise CommandFailed(
            f"{file} is not the config of an adapter.",
            hint="It is a JSON object with the rank `r`; its `target_modules` are a list of names.",
        )
    return config


def from_server(path: str, data: str | None) -> Path:
    """The folder of a tinker:// path on a server on this machine."""
    try:
        from tinkex.server.folder_lock import database_file, open_shared_store
        from tinkex.server.settings import Settings
        from tinkex.server.store import DatabaseRefused
    except ModuleNotFoundError as error:
        raise missing_package(error, "a tinker:// path", "all") from error
    settings = Settings.from_sources({"data": data})
    database = database_file(settings.db_url)
    if not settings.folder.is_dir() or (database is not None and not database.is_file()):
        raise CommandFailed(
            f"{settings.folder} is not the data folder of a server.", hint="Use --data DIR."
        )
    try:
        store = open_shared_store(settings)
    except DatabaseRefused as error:
        raise CommandFailed(str(error)) from error

    async def find() -> Path | None:
        version = await store.checkpoints.find(path, readers=["local"])
        return None if version is None else Path(await store.checkpoints.open(version.version_id))

    try:
        folder = asyncio.run(find())
    finally:
        store.close()
    if folder is None:
        raise CommandFailed(
            f"there is no checkpoint {path} in {settings.folder}.",
            hint="Use --data DIR to name the data folder.",
        )
    return folder

"""`tinkex export PATH --as peft|vllm|hf|gguf`: weights for other programs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click

import tinkex
from tinkex.cli.checkpoint import folder_name
from tinkex.cli.completion import complete_adapters
from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.merge import adapter_config, named_base
from tinkex.cli.output import examples, report, size
from tinkex.cli.service_options import progress_bar, rest_client, service_options
from tinkex.durable_files import may_be_replaced, replace_folder
from tinkex.models.weight_file_checks import MAX_HEADER_BYTES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: The output projection as the hosted service names it, and as PEFT does.
_THEIR_HEADS = ("model.unembed_tokens", "unembed_tokens")
_HEAD = "lm_head"


@click.command(
    "export",
    epilog=examples(
        "tinkex export tinker://RUN/sampler_weights/final --as peft",
        "tinkex export tinker://RUN/sampler_weights/final --as hf -o pirate",
        "tinkex export tinker://RUN/sampler_weights/final --as gguf --dtype q8_0",
        "tinkex export ./adapter --as gguf --base ~/models/Qwen3-0.6B",
    ),
)
@click.argument("adapter", metavar="PATH", shell_complete=complete_adapters)
@click.option(
    "--as",
    "form",
    type=click.Choice(["peft", "vllm", "hf", "gguf"]),
    required=True,
    help="peft, vllm: the adapter alone. hf: a full model. gguf: a file for llama.cpp, with a "
    "Modelfile.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="The new folder.  [default: named by PATH and the form]",
)
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@click.option(
    "--base",
    metavar="NAME|FOLDER",
    help="The base model.  [default: the one named by the adapter]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "q8_0"]),
    help="Of the weights; float16 and q8_0 for gguf only.  [default: hf: that of the base model; "
    "gguf: float16]",
)
@service_options
def command(
    adapter: str,
    form: str,
    output: Path | None,
    force: bool,
    base: str | None,
    dtype: str | None,
) -> None:
    """Export saved weights for other programs.

    PATH is a tinker:// path, which is downloaded from the service (an interrupted download is
    resumed), or the folder of an adapter. hf and gguf add the adapter to its base model, which
    must be on this machine, or be downloadable. For peft and vllm its config must be, if other
    programs arrange the weights in other ways, as those of experts.
    """
    remote = adapter.startswith("tinker://")
    if form in ("peft", "vllm") and dtype:
        raise click.UsageError("--dtype is for hf and gguf: an adapter is exported as it is.")
    if form == "hf" and dtype in ("float16", "q8_0"):
        raise click.UsageError(f"--dtype {dtype} is for gguf.")
    if not remote and not Path(adapter).is_dir():
        raise CommandFailed(
            f"{adapter} is neither a tinker:// path nor a folder.",
            hint="`tinkex checkpoint list` shows yours.",
        )
    name = folder_name(adapter) if remote else Path(adapter).resolve().name
    target = output or Path(f"{name}-{form}")
    if target.is_file():
        raise CommandFailed(f"{target} is a file.", hint="Name a folder with --output.")
    if not may_be_replaced(target):
        raise CommandFailed(
            f"{target} is the current folder, your home folder, or around one of these. Such a "
            "folder is never replaced.",
            hint="Name a new folder with --output.",
        )
    if target.exists() and not force:
        raise CommandFailed(
            f"{target} already exists.", hint="Add --force to replace it, or use --output."
        )
    fields: dict[str, Any] = {"path": adapter, "form": form, "destination": str(target)}
    with downloaded(adapter, target) if remote else contextlib.nullcontext(Path(adapter)) as source:
        base_model = base or named_base(source)
        with replacing(target) as part:
            if form in ("peft", "vllm"):
                rank = write_adapter(source, part, base_model, base, form)
                words = f"{target}: an adapter for {base_model} ({size(bytes_in(part))})."
                advice = f"Use it: PeftModel.from_pretrained(base, {str(target)!r})"
                if form == "vllm":
                    options = f"--enable-lora --max-lora-rank {rank}"
                    options += f" --lora-modules {target.name}={target}"
                    advice = f"Use it: vllm serve {base_model} {options}"
            else:
                words, advice, more = write_merged(source, part, base_model, form, dtype, target)
                fields |= more
            readable(part)
            fields |= {"base_model": base_model, "size_bytes": bytes_in(part)}
    report(f"{words}\n{advice}", fields, err=False)


def write_merged(
    source: Path, part: Path, base_model: str, form: str, dtype: str | None, target: Path
) -> tuple[str, str, dict[str, Any]]:
    """Write the full model. Returns what to say, and fields for JSON."""
    try:
        import torch

        from tinkex.engine.adapters import gguf_export
        from tinkex.engine.adapters.merge import merge, merged_model
        from tinkex.engine.device import DTYPES
        from tinkex.engine.model.unsupported import UnsupportedModel
        from tinkex.models.resolve import ModelNotFound, resolve
        from tinkex.models.tokenizer import load_tokenizer
        from tinkex.models.weight_file_checks import RefusedFolder
        from tinkex.wire.errors import UserFailure

        if form == "gguf":
            import gguf  # noqa: F401 (before a model is loaded)
    except ModuleNotFoundError as error:
        extra = "gguf" if error.name == "gguf" else "engine"
        raise missing_package(error, f"`tinkex export --as {form}`", extra) from error
    try:
        base = resolve(base_model)
        if form == "hf":
            part.rmdir()  # the merge makes it
            merged = merge(base.folder, source, part, DTYPES[dtype] if dtype else None)
            words = f"{target}: {base.name} with the adapter, {merged.dtype} ({size(merged.size_bytes)})."
            advice = f"Use it: AutoModelForCausalLM.from_pretrained({str(target)!r})"
            return words, advice, {"dtype": merged.dtype, "untied": merged.untied}
        chosen = dtype or "float16"
        gguf_export.check_supported(json.loads((base.folder / "config.json").read_text()), chosen)
        model, untied = merged_model(base.folder, source, torch.float32)
        file = f"{target.name}.gguf"
        gguf_export.write_gguf(model, base.folder, part / file, name=target.name, format=chosen)
        text = gguf_export.modelfile(load_tokenizer(base.folder), file)
        (part / "Modelfile").write_text(text, encoding="utf-8")
    except (UserFailure, UnsupportedModel, RefusedFolder, ModelNotFound) as error:
        raise CommandFailed(str(error)) from error
    words = f"{target / file}: {base.name} with the adapter, {chosen} ({size(bytes_in(part))})."
    advice = f"Use it: ollama create NAME -f {target / 'Modelfile'}"
    return words, advice, {"dtype": chosen, "untied": untied, "file": str(target / file)}


@contextmanager
def downloaded(path: str, target: Path) -> Iterator[Path]:
    """The adapter of a checkpoint, beside the target until it is written. Resumes a download."""
    folder = target.with_name(f".{folder_name(path)}.adapter")
    with progress_bar("Downloading") as show:
        tinkex.download_checkpoint(path, folder, rest=rest_client(), overwrite=True, progress=show)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder that takes the place of `target` when it is complete."""
    target = target.absolute()
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        replace_folder(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_adapter(source: Path, part: Path, base_model: str, base: str | None, form: str) -> int:
    """Write the two files of an adapter, as PEFT or vLLM reads them. Returns the rank."""
    for name in (CONFIG, WEIGHTS):
        if not (source / name).is_file():
            raise CommandFailed(f"{source} has no {name}.", hint="Give the folder of an adapter.")
    copy_config(source, part / CONFIG, base)
    if needs_base(source / WEIGHTS) or reads_images(base_model):
        write_for_base(source, part, base_model, form)
    else:
        copy_with_peft_names(source / WEIGHTS, part / WEIGHTS)
    # Layouts for vLLM have another rank.
    return int(adapter_config(part)["r"])


def copy_config(source: Path, target: Path, base: str | None) -> None:
    """Write the config of an adapter with the names of PEFT."""
    config = adapter_config(source)
    if base:
        config["base_model_name_or_path"] = base
    if isinstance(config.get("target_modules"), list):
        names = {_peft_module(module) for module in config["target_modules"]}
        config["target_modules"] = sorted(names)
    try:
        text = json.dumps(config, indent=2)
    except RecursionError as error:  # it was read by C code, which may go deeper
        raise CommandFailed(
            f"{source / CONFIG} is nested too deeply.", hint="Download or save the adapter again."
        ) from error
    target.write_text(text + "\n", encoding="utf-8")


def needs_base(weights: Path) -> bool:
    """Whether other programs arrange the matrices in other ways, or name the layers differently."""
    with weights.open("rb") as file:
        names = read_header(file, weights)
    parts = (".experts.", ".attn.", ".in_proj_", ".mixer.")
    return any(part in name for name in names for part in parts)


def reads_images(base_model: str) -> bool:
    """Whether other programs find the layers of a base model beside a vision tower."""
    from tinkex.engine.model.image_models import has_tower
    from tinkex.models.resolve import base_name, existing_folder, find_in_hub_cache

    folder = existing_folder(base_model)
    if folder is None:
        folder, _ = find_in_hub_cache(base_name(base_model), os.environ, config_only=True)
    if folder is None:
        return False
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and has_tower(config, folder)


def write_for_base(source: Path, part: Path, base_model: str, form: str) -> None:
    """Write the matrices, and what the config says of them, as the base model needs them."""
    try:
        from tinkex.engine.adapters.peft_export import export_adapter
        from tinkex.engine.model.unsupported import UnsupportedModel
        from tinkex.models.resolve import ModelNotFound, resolve
        from tinkex.wire.errors import UserFailure
    except ModuleNotFoundError as error:
        what = f"`tinkex export --as {form}` of this adapter"
        raise missing_package(error, what, "engine") from error
    try:
        # Its weights are many gigabytes, and say nothing about the form of an adapter.
        base = resolve(base_model, config_only=True)
        export_adapter(source, part, base.folder, form)
    except (UserFailure, UnsupportedModel, ModelNotFound) as error:
        raise CommandFailed(str(error)) from error


def read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    """The header of a safetensors file; its tensors follow."""
    size = int.from_bytes(file.read(8), "little")
    header: object = None
    if size <= min(MAX_HEADER_BYTES, path.stat().st_size):
        with contextlib.suppress(ValueError, RecursionError):
            header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise CommandFailed(
            f"{path} is not a safetensors file.", hint="Download or save the adapter again."
        )
    return header


def copy_with_peft_names(source: Path, target: Path) -> None:
    """Copy a safetensors file. Only its header has names: its tensors are copied as they are."""
    with source.open("rb") as read, target.open("wb") as written:
        header = read_header(read, source)
        renamed = json.dumps({_peft_key(key): value for key, value in header.items()}).encode()
        renamed += b" " * (-len(renamed) % 8)
        written.write(struct.pack("<Q", len(renamed)) + renamed)
        shutil.copyfileobj(read, written)


def _peft_key(key: str) -> str:
    prefix = "base_model.model."
    for head in _THEIR_HEADS:
        if key.startswith(f"{prefix}{head}."):
            return f"{prefix}{_HEAD}.{key.removeprefix(f'{prefix}{head}.')}"
    return key


def _peft_module(module: str) -> str:
    return _HEAD if module in _THEIR_HEADS else module


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def readable(folder: Path) -> None:
    """The modes that the umask allows: downloads and weights are written as private files."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)

"""
The tokenizer that belongs to a model. Everything heavy is imported when one is asked for.

A model's folder or its files in the Hugging Face cache are enough, with `tokenizers` alone;
transformers is only used for models that have no fast tokenizer.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from tinkex.client.errors import TinkerError

#: Models whose tokenizer is code of their own, pinned to the revision that was looked at.
PINNED = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}
LLAMA_MIRROR = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def tokenizer_id_of(model_name: str, tokenizer_id: str | None) -> str:
    """Where the tokenizer of a model is found: what the server says, else a rule by name. Pure."""
    if tokenizer_id:
        # A suffix after ":" names a variant of the model; a folder may hold a colon of its own.
        return tokenizer_id if os.path.isabs(tokenizer_id) else tokenizer_id.partition(":")[0]
    name = model_name.partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return LLAMA_MIRROR  # the original is gated
    if name == "moonshotai/Kimi-K2.5-Text-Only":
        return "moonshotai/Kimi-K2.5"
    return "/".join(name.split("/")[:2])


@functools.lru_cache(maxsize=32)
def load(model_name: str, tokenizer_id: str | None = None) -> Any:
    """The tokenizer of a model, kept for the rest of the process."""
    found = tokenizer_id_of(model_name, tokenizer_id)
    if Path(found).is_dir():
        return _from_folder(Path(found))
    if found.startswith(("TML/", "thinkingmachines/")):
        raise TinkerError(
            f"The tokenizer {found!r} is not public: it comes with the package tml_tokenizers."
        )
    if found not in PINNED:
        folder = _from_hub_cache(found) or _embedded(found) or _from_hub(found)
        if folder is not None:
            return _from_folder(folder)
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise TinkerError(
            f"No tokenizer.json for {found!r} was found in the Hugging Face cache or on the hub. "
            "If the model is local, give its folder; if its tokenizer is code of its own, "
            "pip install transformers."
        ) from error
    pinned = {"revision": PINNED[found], "trust_remote_code": True} if found in PINNED else {}
    try:
        return AutoTokenizer.from_pretrained(found, use_fast=True, **pinned)
    except (OSError, ValueError) as error:
        raise TinkerError(
            f"No tokenizer for {found!r} was found in the Hugging Face cache or on the hub: "
            f"{str(error).splitlines()[0]} A TrainingClient's get_tokenizer() asks the server, "
            "which may know a folder on this machine."
        ) from error


def _from_folder(folder: Path) -> Any:
    from tinkex.models.tokenizer import TokenizerError, load_tokenizer

    try:
        return load_tokenizer(folder)
    except TokenizerError as error:
        raise TinkerError(str(error)) from error


def _from_hub_cache(name: str) -> Path | None:
    from tinkex.models.resolve import hub_cache

    snapshots = hub_cache(os.environ) / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def _embedded(name: str) -> Path | None:
    from tinkex.models.embedded import ensure_embedded
    from tinkex.models.resolve import DEFAULT_MODEL

    return ensure_embedded() if name == DEFAULT_MODEL else None


def _from_hub(name: str) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        return None
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception:  # noqa: BLE001 (not there, not reachable, not allowed: transformers says which)
        return None
    return folder if (folder / "tokenizer.json").is_file() else None

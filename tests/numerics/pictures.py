"""Tiny models that read images, with random weights, and pictures for them."""

import functools
import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from numerics.hybrids import EXPERTS as HYBRID_EXPERTS
from numerics.hybrids import SHAPE as HYBRID_SHAPE
from numerics.test_families import SHAPE
from tinkex.models.tiny_model import write_tiny_tokenizer
from tinkex.wire.inputs import Datum, ImageChunk, ModelInput
from tinkex.wire.prompt_chunks import Chunk, EncodedTextChunk

PLACEHOLDER = 390
#: Pixels of a placeholder: two by two patches of four by four.
SIDE = 8

TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
#: A learned grid of positions, and features for the first two layers of the decoder.
DEEP = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}


def rope(*sections: int, **other: Any) -> dict[str, Any]:
    own = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": own | other}


#: The text part and the tower of each family.
IMAGE_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VL": (
        SHAPE | {"num_attention_heads": 2, "max_position_embeddings": 512} | rope(2, 3, 3),
        {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3VL": (
        SHAPE | {"head_dim": 16, "max_position_embeddings": 512} | rope(4, 2, 2),
        DEEP,
    ),
    "Qwen3VLMoe": (
        SHAPE
        | {"head_dim": 16, "max_position_embeddings": 512}
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | rope(4, 2, 2),
        DEEP,
    ),
    "Qwen3_5": (
        HYBRID_SHAPE | {"head_dim": 32} | rope(4, 2, 2, partial_rotary_factor=0.5),
        {"num_position_embeddings": 16},
    ),
    "Qwen3_5Moe": (
        HYBRID_SHAPE | HYBRID_EXPERTS | {"head_dim": 32} | rope(4, 2, 2, partial_rotary_factor=0.5),
        {"num_position_embeddings": 16},
    ),
}
#: Their recurrent layers round differently in chunks and token by token, see test_hybrids.py.
HYBRIDS = ("Qwen3_5", "Qwen3_5Moe")


def write_image_model(
    folder: Path, family: str, *, decay: tuple[float, float] | None = None, **extra: Any
) -> Path:
    """`extra` is for the config of the text part, `decay` as in `write_hybrid`."""
    text, tower = IMAGE_MODELS[family]
    config = getattr(transformers, f"{family}Config")(
        text_config=text | extra,
        vision_config=TOWER | tower,
        image_token_id=PLACEHOLDER,
        video_token_id=PLACEHOLDER + 1,
        vision_start_token_id=PLACEHOLDER + 2,
        vision_end_token_id=PLACEHOLDER + 3,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4 if "conv1d" in name else 0.15)
        elif decay is not None and name.endswith("A_log"):
            torch.nn.init.uniform_(weight, *decay)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    write_preprocessor(folder)
    return folder


def write_preprocessor(folder: Path) -> None:
    config = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": TOWER["patch_size"],
        "merge_size": TOWER["spatial_merge_size"],
        "temporal_patch_size": TOWER["temporal_patch_size"],
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 64 * SIDE * SIDE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(config))


@functools.cache
def picture(rows: int, columns: int, seed: int = 0) -> ImageChunk:
    """A picture of so many placeholders, of random colors."""
    size = (rows * SIDE, columns * SIDE, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return ImageChunk(data=file.getvalue(), format="png", expected_tokens=rows * columns)


def text(length: int, seed: int = 0) -> EncodedTextChunk:
    return EncodedTextChunk(np.random.default_rng(seed).integers(0, 380, length))


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    """With placeholders."""
    found: list[int] = []
    for chunk in chunks:
        if isinstance(chunk, EncodedTextChunk):
            found += chunk.tokens
        else:
            found += [PLACEHOLDER] * chunk.length
    return found


def datum_of(chunks: Sequence[Chunk]) -> Datum:
    """All but the last chunk's last token; images have target 0 and weight 0, as clients do it."""
    ids = ids_of(chunks)
    *before, last = chunks
    assert isinstance(last, EncodedTextChunk)
    targets = np.array([0 if each == PLACEHOLDER else each for each in ids[1:]])
    return Datum(
        model_input=ModelInput([*before, EncodedTextChunk(last.tokens[:-1])]),
        loss_fn_inputs={
            "target_tokens": targets,
            "weights": (targets != 0).astype(np.float32),
        },
    )


@functools.cache
def untouched(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def arguments_of(folder: Path, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """What transformers' own processing makes of a prompt."""
    ids = torch.tensor([ids_of(chunks)])
    found: dict[str, Any] = {"input_ids": ids}
    images = [
        Image.open(io.BytesIO(chunk.data)) for chunk in chunks if isinstance(chunk, ImageChunk)
    ]
    if images:
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        found |= processor(images=images, return_tensors="pt")
        kinds = [
            torch.full((chunk.length,), int(isinstance(chunk, ImageChunk))) for chunk in chunks
        ]
        found["mm_token_type_ids"] = torch.cat(kinds)[None]
    return found


def logprobs_of(folder: Path, chunks: Sequence[Chunk]) -> np.ndarray:
    """Of all tokens after the first, by the untouched model; 0 is the target at images."""
    with torch.no_grad():
        logits = untouched(folder)(**arguments_of(folder, chunks)).logits[0, :-1]
    targets = torch.tensor([0 if each == PLACEHOLDER else each for each in ids_of(chunks)[1:]])
    found: np.ndarray = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
    return found

"""Which models read images, and why others do not. Without torch.

Their text part is computed like any other decoder; `vision_tower` has the rest.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkex.models.image_header import ImageRefused
from tinkex.models.patch_rules import PatchRules

#: The `model_type` of configs whose images are read.
IMAGE_TYPES = frozenset({"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})

#: Keys of the tower's config, and what the image processor calls the same.
SAME = {"patch_size": "patch", "spatial_merge_size": "merge", "temporal_patch_size": "frames"}


def has_tower(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder has a vision tower that is loaded, and says what it reads."""
    return (
        config.get("model_type") in IMAGE_TYPES
        and isinstance(config.get("vision_config"), Mapping)
        and _has_tower_weights(folder)
        and _unreadable(config["vision_config"], folder) is None
    )


def why_no_images(config: Mapping[str, Any], folder: Path) -> str | None:
    """Why images in requests are refused; None if they are read."""
    kind = config.get("model_type")
    if not isinstance(config.get("vision_config"), Mapping):
        return "this model reads text only."
    if kind not in IMAGE_TYPES or not _has_tower_weights(folder):
        return f"this server runs only the text part of this {kind} model."
    if (reason := _unreadable(config["vision_config"], folder)) is not None:
        return reason
    if importlib.util.find_spec("PIL") is None:
        return (
            "this server cannot read images, because Pillow is not installed. The operator can "
            "run `pip install 'tinkex[images]'` and restart it."
        )
    return None


def _has_tower_weights(folder: Path) -> bool:
    """A GGUF file has no tower. Of a model whose weights are elsewhere, a folder has neither."""
    return any(folder.glob("*.safetensors")) or not any(folder.glob("*.gguf"))


def _unreadable(tower: Mapping[str, Any], folder: Path) -> str | None:
    """What is wrong with the settings of the image processor, which say how images are cut."""
    try:
        rules = PatchRules.read(folder)
    except ImageRefused as refused:
        return str(refused)
    for key, own in SAME.items():
        if tower.get(key, getattr(rules, own)) != getattr(rules, own):
            return (
                f"this model's image processor has {key.removeprefix('spatial_')} = "
                f"{getattr(rules, own)}, but its config.json has {str(tower[key])[:40]}."
            )
    return None

"""Which models read images, and why others do not. Without torch.

Their text part is computed like any other decoder; `vision_tower` has the rest.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The `model_type` of configs whose images are read.
IMAGE_TYPES = frozenset({"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})

#: The file that says how an image becomes patches.
PREPROCESSOR = "preprocessor_config.json"


def has_tower(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder has a vision tower that is loaded, and says what it reads."""
    return (
        config.get("model_type") in IMAGE_TYPES
        and bool(config.get("vision_config"))
        and (folder / PREPROCESSOR).is_file()
        and any(folder.glob("*.safetensors"))
    )


def why_no_images(config: Mapping[str, Any], folder: Path) -> str | None:
    """Why images in requests are refused; None if they are read."""
    kind = config.get("model_type")
    if not config.get("vision_config"):
        return "this model reads text only."
    if kind not in IMAGE_TYPES:
        return f"of {kind} models, this server runs only the part that reads text."
    if not has_tower(config, folder):
        return (
            f"the folder of this model has no {PREPROCESSOR}, which says how to read images, so the "
            "server runs only the part that reads text. The operator can add the file of the "
            "original model."
        )
    if importlib.util.find_spec("PIL") is None:
        return (
            "this server cannot read images, because Pillow is not installed. The operator can "
            "run `pip install 'tinkex[images]'` and restart it."
        )
    return None

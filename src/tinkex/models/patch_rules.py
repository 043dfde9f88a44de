"""
How a model cuts an image into patches: the settings of the image processor in its folder.

The rules are those of transformers' `Qwen2VLImageProcessor`, which Qwen2-VL, Qwen2.5-VL, Qwen3-VL
and Qwen3.5 have. They are few, so they are written here: the engine then needs neither Pillow nor
torchvision, and an image has the same patches with every version of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.models.image_header import ImageRefused, read_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: The image processors with these rules, by what their names begin with.
PROCESSOR = "Qwen2VLImageProcessor"
#: Transformers' values where a folder's file has none.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
#: The longer side of an image divided by the shorter one.
MAX_RATIO = 200
#: Pixels of an image after scaling.
MAX_SCALED_PIXELS = 2**25


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRules:
    #: Pixels on each side of a patch.
    patch: int
    #: Patches on each side of the square that becomes one token.
    merge: int
    #: How often an image is repeated in time, as the tower reads videos.
    frames: int
    #: Bounds of the pixels after scaling.
    min_pixels: int
    max_pixels: int
    #: Pillow's number of the filter that scales.
    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path) -> PatchRules:
        """The rules of a model folder. Raises `ImageRefused` if it has others, or none."""
        found = _processor_settings(folder)
        name = str(found.get("image_processor_type", ""))[:60]
        if not name.startswith(PROCESSOR):
            raise ImageRefused(
                f"this model's image processor is {name or 'not named'}; supported is {PROCESSOR}. "
                "Send text only."
            )
        for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if found.get(step) is False:
                raise ImageRefused(
                    f"this model's image processor has {step} = false, which is not supported."
                )
        size = found.get("size")
        size = size if isinstance(size, Mapping) else {}
        lowest = found.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        highest = found.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        return cls(
            patch=_integer(found.get("patch_size", 14), "patch_size", 256),
            merge=_integer(found.get("merge_size", 2), "merge_size", 16),
            frames=_integer(found.get("temporal_patch_size", 2), "temporal_patch_size", 8),
            min_pixels=_integer(lowest, "min_pixels", MAX_SCALED_PIXELS),
            max_pixels=_integer(highest, "max_pixels", MAX_SCALED_PIXELS),
            # 0 is Pillow's nearest neighbor, 5 its last filter.
            resample=_integer(found.get("resample", 3), "resample", 5, least=0),
            scale=_numbers([found.get("rescale_factor", 1 / 255)], "rescale_factor", 1)[0],
            mean=_numbers(found.get("image_mean") or _MEAN, "image_mean", 3),
            std=_numbers(found.get("image_std") or _STD, "image_std", 3),
        )

    def count(self, data: bytes, format: str, expected_tokens: int | None = None) -> int:
        """The tokens of an image, from its header alone. Raises `ImageRefused`."""
        height, width = read_size(data, format)
        tokens = self.tokens(*self.grid(height, width))
        if expected_tokens not in (None, tokens):
            raise ImageRefused(
                f"expected_tokens is {expected_tokens}, but the image of {width} x {height} pixels "
                f"has {tokens} tokens for this model. Set {tokens}, or leave it out."
            )
        return tokens

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of this size. Raises `ImageRefused`."""
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ImageRefused(
                f"the image has {width} x {height} pixels; one side may be at most {MAX_RATIO} "
                "times as long as the other."
            )
        side = self.patch * self.merge
        down, across = round(height / side) * side, round(width / side) * side
        if down * across > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            down = max(side, math.floor(height / factor / side) * side)
            across = max(side, math.floor(width / factor / side) * side)
        elif down * across < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            down = math.ceil(height * factor / side) * side
            across = math.ceil(width * factor / side) * side
        return down // self.patch, across // self.patch

    def tokens(self, rows: int, columns: int) -> int:
        return rows * columns // self.merge**2

    def patches(self, rgb: bytes, rows: int, columns: int) -> NDArray[np.float32]:
        """The patches of an image that was scaled to its grid: [rows * columns, values]."""
        import numpy as np

        side, pixels = self.merge, self.patch**2
        tiles = (
            np.frombuffer(rgb, dtype=np.uint8)
            .reshape(rows // side, side, self.patch, columns // side, side, self.patch, 3)
            # Squares of patches follow each other, and the patches of a square.
            .transpose(0, 3, 1, 4, 6, 2, 5)
            .reshape(rows * columns, 3, pixels)
        )
        found = np.empty((rows * columns, 3, self.frames, pixels), np.float32)
        for color, values in enumerate(self._values()):
            found[:, color] = values.take(tiles[:, color])[:, None]
        return found.reshape(rows * columns, -1)

    def _values(self) -> NDArray[np.float32]:
        """The number that each of 256 brightnesses becomes, for each color: [3, 256]."""
        import numpy as np

        scaled = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean = np.array(self.mean, dtype=np.float32)[:, None]
        return (scaled - mean) / np.array(self.std, dtype=np.float32)[:, None]


def placeholder_of(folder: Path) -> int:
    """The token that chat templates write for an image. Raises `ImageRefused`."""
    try:
        found = json.loads((folder / "config.json").read_text()).get("image_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ImageRefused(f"this model's config.json cannot be read: {error}") from None
    if type(found) is not int:
        raise ImageRefused(
            "this model takes no images: its config.json has no image_token_id. Send text only."
        )
    return found


def _processor_settings(folder: Path) -> Mapping[str, Any]:
    """Transformers 5 writes them into processor_config.json, which goes before the older file."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        try:
            found = json.loads((folder / name).read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ImageRefused(f"this model's {name} cannot be read: {error}") from None
        if isinstance(found, dict):
            found = found if name.startswith("pre") else found.get("image_processor")
        if isinstance(found, dict):
            return found
    raise ImageRefused(
        "this model's folder has no preprocessor_config.json, which says how images become "
        "patches. Copy it from the published model, or send text only."
    )


def _integer(value: Any, name: str, most: int, *, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ImageRefused(
            f"this model's image processor has {name} = {str(value)[:40]}; allowed are {least} to "
            f"{most}."
        )
    return value


def _numbers(values: Any, name: str, count: int) -> tuple[float, ...]:
    good = (
        isinstance(values, (list, tuple))
        and len(values) == count
        and all(type(one) in (int, float) and math.isfinite(one) for one in values)
    )
    if not good or (name == "image_std" and 0 in values):
        raise ImageRefused(
            f"this model's image processor has {name} = {str(values)[:40]}; {count} finite "
            "numbers are needed, and no deviation of 0."
        )
    return tuple(map(float, values))

"""An image as a vision tower reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """The patches of one image, in the order of transformers' image processor."""

    #: SHA-256 of the encoded bytes.
    digest: bytes
    #: Patches in time, rows and columns: `image_grid_thw`.
    grid: tuple[int, int, int]
    #: [patches, values]: `pixel_values`. Eight times the bytes of the scaled RGB pixels.
    patches: NDArray[np.float32]
    #: Placeholder tokens of the prompt that the image stands for.
    tokens: int

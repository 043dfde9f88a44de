"""Where the images of a sequence are, and the rotary positions and cache keys that follow from it.

An image stands in a sequence as placeholders, one for each square of merged patches, row by row. Its
positions have three numbers (M-RoPE): time, row and column. Text after an image continues behind the
largest of them, so it has smaller positions than places in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tinkex.engine.images.prepared_image import PreparedImage

# N places of a sequence

Ints = npt.NDArray[np.int64]


class PlacedImage(NamedTuple):
    """An image, and the place of its first placeholder."""

    start: int
    image: PreparedImage

    @property
    def stop(self) -> int:
        return self.start + self.image.tokens


@dataclass(frozen=True, eq=False)
class ImagePlaces:
    images: tuple[PlacedImage, ...]
    #: [3, N] to the end of the last image.
    positions_3N: Ints
    #: What is added to a place behind the last image to get its position.
    delta: int

    @classmethod
    def of(cls, images: Sequence[PlacedImage], merge_size: int) -> ImagePlaces:
        """`images` in their order. `merge_size` squared patches are one placeholder."""
        parts = [np.zeros((3, 0), np.int64)]
        place = position = 0
        for start, image in images:
            text = np.arange(position, position + start - place)
            position += len(text)
            rows, columns = (size // merge_size for size in image.grid[1:])
            grid_3N = np.stack(
                [
                    np.zeros(rows * columns, np.int64),
                    np.repeat(np.arange(rows), columns),
                    np.tile(np.arange(columns), rows),
                ]
            )
            parts += [np.broadcast_to(text, (3, len(text))), position + grid_3N]
            position += max(rows, columns)
            place = start + image.tokens
        return cls(tuple(images), np.concatenate(parts, axis=1), position - place)

    def __bool__(self) -> bool:
        return bool(self.images)

    def positions(self, start: int, stop: int) -> Ints:
        """[3, stop - start]: the positions of these places, also of places behind all images."""
        end = self.positions_3N.shape[1]
        behind = np.arange(max(start, end), stop) + self.delta
        own_3N = self.positions_3N[:, start:stop]
        return np.concatenate([own_3N, np.broadcast_to(behind, (3, len(behind)))], axis=1)

    def keys(self, tokens: list[int]) -> list[int]:
        """
        What the prefix cache compares: tokens, and at placeholders the content of the image.

        Placeholders of all images are the same token, so images of equal size would share pages.
        """
        keys = list(tokens)
        for placed in self.images:
            # No token is negative.
            key = -1 - int.from_bytes(placed.image.digest, "big")
            keys[placed.start : placed.stop] = [key] * placed.image.tokens
        return keys

    def mask(self, length: int) -> npt.NDArray[np.bool_]:
        """Which of the first `length` places belong to images."""
        found = np.zeros(length, np.bool_)
        for placed in self.images:
            found[placed.start : placed.stop] = True
        return found


#: Of text.
NO_IMAGES = ImagePlaces((), np.zeros((3, 0), np.int64), 0)


def packed_positions(parts: Sequence[tuple[ImagePlaces, int, int]]) -> torch.Tensor | None:
    """
    [3, T]: the positions of adjacent parts of sequences, each from one place to another.

    None if no sequence has images.
    """
    if not any(places for places, _, _ in parts):
        return None
    return torch.from_numpy(
        np.concatenate([places.positions(start, stop) for places, start, stop in parts], axis=1)
    )

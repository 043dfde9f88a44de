"""Checks of a model input: which tokens it is, and where its images are.

Images are decoded before, away from the thread that computes; see `request_images`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.engine.model.image_places import NO_IMAGES, ImagePlaces, PlacedImage
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import ModelInput
from tinkex.wire.prompt_chunks import (
    Chunk,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
)

if TYPE_CHECKING:
    from tinkex.engine.model.base_model import BaseModel

# N tokens of one input

Ints = npt.NDArray[np.int64]

#: The decoded images of a request, by the SHA-256 of their files.
PreparedImages = Mapping[bytes, PreparedImage]
NONE_PREPARED: PreparedImages = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """How images stand in a sequence."""

    placeholder: int
    merge_size: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    vocab_size: int
    max_context_length: int
    #: None if images are refused, for this reason.
    images: ImageTokens | None = None
    no_images: str = "this model reads text only."


def limits_of(model: BaseModel) -> Limits:
    images, vision = None, model.vision
    if vision is not None:
        images = ImageTokens(placeholder=vision.placeholder, merge_size=vision.merge_size)
    return Limits(
        vocab_size=model.vocab_size,
        max_context_length=model.max_context_length,
        images=images,
        no_images=model.no_images or "",
    )


class InputTokens(NamedTuple):
    tokens_N: Ints
    images: ImagePlaces


def digest(image: ImageChunk) -> bytes:
    return hashlib.sha256(image.data).digest()


def check_input(
    model_input: ModelInput, limits: Limits, images: PreparedImages, *, where: str
) -> InputTokens:
    """The tokens of an input. Raises `UserFailure` unless the model reads it and it fits."""
    placed: list[PlacedImage] = []
    parts: list[npt.NDArray[np.integer]] = []
    length = 0
    for position, chunk in enumerate(model_input.chunks):
        check_kind(position, chunk, limits, where=where)
        if isinstance(chunk, EncodedTextChunk):
            parts.append(chunk.tokens_np)
        elif isinstance(chunk, ImageChunk) and limits.images is not None:
            image = images[digest(chunk)]
            placed.append(PlacedImage(length, image))
            parts.append(np.full(image.tokens, limits.images.placeholder, np.int64))
        length += len(parts[-1])
    check_length(length, limits, where=where)
    tokens_N = np.concatenate(parts).astype(np.int64)
    check_vocabulary(tokens_N, limits, where=where)
    if not placed or limits.images is None:
        return InputTokens(tokens_N, NO_IMAGES)
    return InputTokens(tokens_N, ImagePlaces.of(placed, limits.images.merge_size))


def check_kind(position: int, chunk: Chunk, limits: Limits, *, where: str) -> None:
    """Raises `UserFailure` if the model does not read such chunks."""
    if isinstance(chunk, EncodedTextChunk):
        return
    if limits.images is None:
        raise UserFailure(
            f"{where}: {limits.no_images} chunks[{position}] has type {chunk.type!r}. Send "
            "encoded_text chunks."
        )
    where = f"{where}.chunks[{position}]"
    if isinstance(chunk, DmelChunk):
        raise UserFailure(
            f"{where}: is sound (type 'dmel'), but this model reads text and images only."
        )
    if isinstance(chunk, ImageAssetPointerChunk):
        raise UserFailure(
            f"{where}: names an image by its location, but this server stores no images. Send the "
            "image itself, in a chunk of type 'image'."
        )


def check_length(length: int, limits: Limits, *, where: str) -> None:
    if not length:
        raise UserFailure(f"{where}: is empty; at least one token is needed.")
    if length > limits.max_context_length:
        raise UserFailure(
            f"{where}: has {length} tokens; the model's context is "
            f"{limits.max_context_length}. Shorten the sequence."
        )


def check_vocabulary(tokens: Ints, limits: Limits, *, where: str) -> None:
    outside = (tokens < 0) | (tokens >= limits.vocab_size)
    if outside.any():
        at = np.unravel_index(int(np.argmax(outside)), tokens.shape)
        raise UserFailure(
            f"{where}: token {tokens[at]} at position {'/'.join(map(str, at))} is outside the "
            f"vocabulary; allowed ids are 0 to {limits.vocab_size - 1}."
        )

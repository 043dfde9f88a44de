"""Decodes the images of requests, before the requests are admitted.

Decoding takes up to seconds, so a thread of its own calls this, not the one that computes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tinkex.engine.images.image_reader import ImageReader
from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.engine.input_checks import (
    NONE_PREPARED,
    Limits,
    PreparedImages,
    check_kind,
    check_length,
    digest,
)
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import ModelInput
from tinkex.wire.prompt_chunks import EncodedTextChunk, ImageChunk
from tinkex.wire.training import ForwardBackwardInput

#: Tokens of the different images of one request. Until they are computed their patches are in host
#: memory, about 25 KB for a token.
MAX_IMAGE_TOKENS = 1 << 17


class NamedInput(NamedTuple):
    #: What errors call it.
    where: str
    model_input: ModelInput


def inputs_of(work: ForwardBackwardInput) -> list[NamedInput]:
    return [
        NamedInput(f"data[{index}].model_input", datum.model_input)
        for index, datum in enumerate(work.data)
    ]


def has_images(inputs: Iterable[NamedInput]) -> bool:
    """Whether there is anything but text, so that a check of kinds may take a while."""
    return any(
        not isinstance(chunk, EncodedTextChunk)
        for each in inputs
        for chunk in each.model_input.chunks
    )


class RequestImages:
    """For several threads: they take turns, image by image."""

    def __init__(self, reader: ImageReader, limits: Limits) -> None:
        self._reader, self._limits = reader, limits
        self._turn = threading.Lock()

    def prepare(self, inputs: Sequence[NamedInput]) -> PreparedImages:
        """
        The images of a request, each once. Raises `UserFailure`.

        All are counted before the first is decoded: whether a request fits shows in their headers.
        """
        if not has_images(inputs):
            return NONE_PREPARED
        found: dict[bytes, tuple[str, ImageChunk]] = {}
        total = 0
        for where, model_input in inputs:
            length = 0
            for position, chunk in enumerate(model_input.chunks):
                check_kind(position, chunk, self._limits, where=where)
                if not isinstance(chunk, ImageChunk):
                    length += chunk.length
                    continue
                name = f"{where}.chunks[{position}]"
                tokens = self._count(name, chunk)
                length += tokens
                key = digest(chunk)
                if key not in found:
                    found[key] = name, chunk
                    total += tokens
            check_length(length, self._limits, where=where)
        if total > MAX_IMAGE_TOKENS:
            raise UserFailure(
                f"the {len(found)} different images of the request have {total} tokens; at most "
                f"{MAX_IMAGE_TOKENS} are allowed. Send fewer images in one request."
            )
        return {key: self._decode(*each) for key, each in found.items()}

    def _count(self, where: str, image: ImageChunk) -> int:
        try:
            return self._reader.count(image)
        except UserFailure as failure:
            raise UserFailure(f"{where}: {failure}") from None

    def _decode(self, where: str, image: ImageChunk) -> PreparedImage:
        try:
            with self._turn:
                (found,) = self._reader.prepare([image])
        except UserFailure as failure:
            raise UserFailure(f"{where}: {failure}") from None
        return found

    def close(self) -> None:
        self._reader.close()

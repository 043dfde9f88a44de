"""Reads the images of requests for one model: counts their tokens, and makes their patches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tinkex.engine.images.image_decoder import DecoderLimits, ImageDecoder
from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.models.image_header import ImageRefused, read_size
from tinkex.models.patch_rules import PatchRules
from tinkex.wire.errors import UserFailure
from tinkex.wire.prompt_chunks import ImageChunk


class ImageReader:
    """
    One per engine. Nothing is read and no process started before the first image.

    Messages do not say where the image is in its request; the caller puts that in front.
    """

    def __init__(self, folder: Path, limits: DecoderLimits | None = None) -> None:
        self._folder = folder
        self._decoder = ImageDecoder(limits or DecoderLimits())

    @property
    def decoder_pid(self) -> int | None:
        """The id of the process that starts decoders; None while there is none."""
        return self._decoder.pid

    @cached_property
    def rules(self) -> PatchRules:
        return PatchRules.read(self._folder)

    def count(self, image: ImageChunk) -> int:
        """The tokens of an image, from its header alone. Raises `UserFailure`."""
        try:
            return self.rules.count(image.data, image.format, image.expected_tokens)
        except ImageRefused as refused:
            raise UserFailure(str(refused)) from None

    def prepare(self, images: Sequence[ImageChunk]) -> list[PreparedImage]:
        """
        Decodes images. Raises `UserFailure` for the first one that cannot be decoded.

        Patches are much larger than files: 24 KB for each token of Qwen3-VL. Prepare the images of
        one micro-batch at a time.
        """
        return [self._prepare(image) for image in images]

    def close(self) -> None:
        """Ends the decoder. A later image starts another one."""
        self._decoder.close()

    def _prepare(self, image: ImageChunk) -> PreparedImage:
        try:
            rules = self.rules
            height, width = read_size(image.data, image.format)
            rows, columns = rules.grid(height, width)
        except ImageRefused as refused:
            raise UserFailure(str(refused)) from None
        rgb = self._decoder.decode(
            image.data,
            is_png=image.format == "png",
            size=(width, height),
            to=(columns * rules.patch, rows * rules.patch),
            resample=rules.resample,
        )
        return PreparedImage(
            digest=hashlib.sha256(image.data).digest(),
            grid=(1, rows, columns),
            patches=rules.patches(rgb, rows, columns),
            tokens=rules.tokens(rows, columns),
        )

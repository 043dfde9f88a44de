"""How many tokens prompts have, for limits and usage. Whether they are valid, the engine checks."""

from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request

from tinkex.models.image_header import ImageRefused
from tinkex.models.patch_rules import PatchRules
from tinkex.server.api.bodies import in_decode_slot
from tinkex.server.api.deps import context_of
from tinkex.wire.inputs import EncodedTextChunk, ImageChunk, ModelInput


async def count_tokens(request: Request, base_model: str, prompts: Sequence[ModelInput]) -> int:
    """
    The tokens of text, and of images as the engine will place them.

    The sender's `expected_tokens` is not used. A prompt that the engine will refuse may have fewer.
    """
    if not any(isinstance(chunk, ImageChunk) for prompt in prompts for chunk in prompt.chunks):
        return _text_tokens(prompts)
    served = context_of(request).executor.served
    folder = next((model.folder for model in served if model.name == base_model), None)
    # A JPEG file may have its size behind a thousand other parts.
    return await in_decode_slot(request, lambda: _text_tokens(prompts) + _images(folder, prompts))


def _text_tokens(prompts: Sequence[ModelInput]) -> int:
    return sum(
        chunk.length
        for prompt in prompts
        for chunk in prompt.chunks
        if isinstance(chunk, EncodedTextChunk)
    )


def _images(folder: Path | None, prompts: Sequence[ModelInput]) -> int:
    if folder is None:
        return 0
    try:
        rules = PatchRules.read(folder)
        return sum(
            rules.count(chunk.data, chunk.format)
            for prompt in prompts
            for chunk in prompt.chunks
            if isinstance(chunk, ImageChunk)
        )
    except ImageRefused:
        return 0

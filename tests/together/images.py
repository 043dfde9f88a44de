"""Pictures of one color for a tiny model that reads images, and the checks of what was trained."""

import base64
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from numerics.pictures import SIDE
from together.capabilities import near

PROGRAM = Path(__file__).with_name("images_program.py")

COLORS = ("red", "lime", "blue", "white", "black", "yellow")
#: Of the pictures: all have the same number of tokens, so only their content tells them apart.
ROWS, COLUMNS = 2, 3


def write_pictures(file: Path) -> Path:
    """Pictures of each color as PNG and as JPEG, and the token of the color."""
    found = []
    for token, color in enumerate(COLORS, start=100):
        image = Image.new("RGB", (COLUMNS * SIDE, ROWS * SIDE), color)
        for format in ("png", "jpeg"):
            data = io.BytesIO()
            image.save(data, format.upper())
            found.append(
                {
                    "data": base64.b64encode(data.getvalue()).decode(),
                    "format": format,
                    "token": token,
                    "tokens": ROWS * COLUMNS,
                }
            )
    file.write_text(json.dumps(found))
    return file


def check(found: dict[str, Any], pictures: Path, *, within: float) -> None:
    """The model learned colors from pictures, went on from saved state, and samples what it saw."""
    tokens = [picture["token"] for picture in json.loads(pictures.read_text())]
    losses = found["losses"]
    assert losses[0] > 2
    assert losses[-1] < 0.1, losses
    assert min(found["blind"]) > 1.5, found["blind"]  # log(6) is the least without pictures
    assert near(found["again"], found["later"], 1e-3), (found["again"], found["later"])
    # Twice each: the second time the prefix is in the cache.
    for position, answers in enumerate(found["sampled"]):
        index = position % len(tokens)
        for sampled, logprobs in answers:
            assert sampled == [tokens[index]]
            assert near(logprobs, [found["logprobs"][index]], within)
    for refusal, words in zip(
        found["refusals"],
        (
            "prompt.chunks[1]: expected_tokens is 99, but the image of 24 x 16 pixels has 6 tokens",
            "prompt.chunks[1]: the image cannot be decoded",
            "data[0].model_input.chunks[1]: the image cannot be decoded",
        ),
        strict=True,
    ):
        assert words in refusal

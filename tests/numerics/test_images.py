"""Models that read images: training and sampling give the numbers of transformers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numerics.helpers import model_from, random_adapter, sample, work
from numerics.pictures import (
    HYBRIDS,
    IMAGE_MODELS,
    PLACEHOLDER,
    arguments_of,
    datum_of,
    ids_of,
    logprobs_of,
    picture,
    text,
    untouched,
    write_image_model,
)
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.merge import merge
from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.engine.model.image_places import ImagePlaces, PlacedImage
from tinkex.wire.inputs import ImageChunk, ModelInput
from tinkex.wire.prompt_chunks import Chunk, EncodedTextChunk
from tinkex.wire.sampling import SampleRequest, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")

#: Rows with no, one and two images; one begins with an image.
ROWS: tuple[tuple[Chunk, ...], ...] = (
    (text(9, 1), picture(3, 5, 1), text(4, 2)),
    (text(13, 3),),
    (picture(4, 4, 2), text(1), picture(2, 6, 3), text(3, 4)),
    (text(2, 5), picture(1, 7, 4), text(5, 6), picture(5, 2, 5), text(30, 7)),
)


def tolerance(family: str) -> float:
    return 2e-4 if family in HYBRIDS else 1e-5


def engine_of(folder: Path, **settings: Any) -> Engine:
    settings = {"kv_tokens": 2048, **settings}
    return Engine(EngineSettings(name="images", folder=folder, device="cpu", **settings))


@pytest.fixture(scope="module")
def engine_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """An engine of a family. Shared: each test drops the models it creates."""
    root, engines = tmp_path_factory.mktemp("images"), dict[str, Engine]()

    def get(family: str) -> Engine:
        if family not in engines:
            engines[family] = engine_of(write_image_model(root / family, family))
        return engines[family]

    yield get
    for engine in engines.values():
        if engine.images is not None:
            engine.images.close()


def request(chunks: Sequence[Chunk], *, samples: int = 1, **options: Any) -> SampleRequest:
    params = {
        name: options.pop(name) for name in list(options) if name in SamplingParams.model_fields
    }
    return SampleRequest(
        prompt=ModelInput(list(chunks)),
        num_samples=samples,
        sampling_params=SamplingParams(**params),
        **options,
    )


def continued(chunks: Sequence[Chunk], tokens: Sequence[int]) -> list[Chunk]:
    return [*chunks, EncodedTextChunk(list(tokens))]


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_positions_are_those_of_transformers(
    family: str, engine_on: Callable[[str], Engine]
) -> None:
    folder = engine_on(family).settings.folder
    for chunks in ROWS:
        arguments = arguments_of(folder, chunks)
        grids = arguments.get("image_grid_thw", torch.zeros(0, 3))
        length = len(ids_of(chunks))
        placed, at, images = [], 0, iter(grids.tolist())
        for chunk in chunks:
            if isinstance(chunk, ImageChunk):
                grid = tuple(next(images))
                image = PreparedImage(b"", grid, np.zeros((0, 0), np.float32), chunk.length)
                placed.append(PlacedImage(at, image))
            at += chunk.length
        places = ImagePlaces.of(placed, merge_size=2)
        expected_31N, delta = untouched(folder).model.get_rope_index(
            arguments["input_ids"],
            arguments.get("mm_token_type_ids", torch.zeros_like(arguments["input_ids"])),
            image_grid_thw=grids,
        )
        np.testing.assert_array_equal(places.positions(0, length), expected_31N[:, 0])
        assert places.delta == int(delta)
        # Parts, as in prefills that end within an image, and tokens that are sampled.
        parts = [places.positions(start, start + 7) for start in range(0, length, 7)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1)[:, :length], expected_31N[:, 0])
        assert places.positions(length + 3, length + 4).tolist() == [[length + 3 + int(delta)]] * 3


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_a_family_trains_and_samples_as_transformers_would(
    family: str, engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """Rows with several images in one micro-batch, an adapter and the base model in one step."""
    engine = engine_on(family)
    folder = engine.settings.folder
    adapter = random_adapter(engine, tmp_path / "adapter", rank=4)
    merged = merge(folder, adapter, tmp_path / "merged").folder
    which = [adapter, None, adapter, None]
    answers = sample(
        engine,
        [request(chunks, samples=2, max_tokens=12, seed=2, stop=[]) for chunks in ROWS],
        which,
    )
    for chunks, answer, key in zip(ROWS, answers, which, strict=True):
        for sequence in answer.sequences:
            assert PLACEHOLDER not in sequence.tokens, "transformers would expect an image"
            row = continued(chunks, sequence.tokens)
            expected = logprobs_of(folder if key is None else merged, row)
            np.testing.assert_allclose(sequence.logprobs_np, expected[-12:], atol=tolerance(family))
    model_from(engine, "m", adapter)
    rows = [
        continued(chunks, answer.sequences[0].tokens)
        for chunks, answer in zip(ROWS, answers, strict=True)
    ]
    outputs = {
        backward: engine.run_pass("m", work(list(map(datum_of, rows))), backward=backward)
        for backward in (True, False)
    }
    for output in outputs.values():
        for row, found in zip(rows, output.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(
                found["logprobs"].to_numpy(), logprobs_of(merged, row), atol=tolerance(family)
            )
    for row, found in zip(rows, outputs[True].loss_fn_outputs, strict=True):
        (alone,) = engine.run_pass("m", work([datum_of(row)]), backward=True).loss_fn_outputs
        np.testing.assert_allclose(
            found["logprobs"].to_numpy(), alone["logprobs"].to_numpy(), atol=1e-5
        )
    for answer, found, key in zip(answers, outputs[True].loss_fn_outputs, which, strict=True):
        if key is not None:
            np.testing.assert_allclose(
                answer.sequences[0].logprobs_np,
                found["logprobs"].to_numpy()[-12:],
                atol=tolerance(family),
            )
    engine.drop("m")

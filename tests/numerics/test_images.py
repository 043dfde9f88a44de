"""Models that read images: training and sampling give the numbers of transformers."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from numerics.helpers import gradients, model_from, random_adapter, sample, work
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
from tinkex.cli.command_group import command
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.checkpoints import from_peft_names
from tinkex.engine.adapters.merge import merge
from tinkex.engine.adapters.model_needs import read_shape
from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.engine.model.image_places import ImagePlaces, PlacedImage
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.request_images import NamedInput, RequestImages
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum, ImageChunk, ModelInput
from tinkex.wire.prompt_chunks import (
    Chunk,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
)
from tinkex.wire.sampling import EMPTY_TOKEN, SampleRequest, SamplingParams
from tinkex.wire.training import AdamOptimizerConfig, LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore")

#: Rows with no, one and two images; one begins with an image.
ROWS: tuple[tuple[Chunk, ...], ...] = (
    (text(9, 1), picture(3, 5, 1), text(4, 2)),
    (text(13, 3),),
    (picture(4, 4, 2), text(1), picture(2, 6, 3), text(3, 4)),
    (text(2, 5), picture(1, 7, 4), text(5, 6), picture(5, 2, 5), text(30, 7)),
)


#: Engines of one test.
OWN: list[Engine] = []


def tolerance(family: str) -> float:
    return 2e-4 if family in HYBRIDS else 1e-5


def engine_of(folder: Path, **settings: Any) -> Engine:
    settings = {"kv_tokens": 2048, **settings}
    engine = Engine(EngineSettings(name="images", folder=folder, device="cpu", **settings))
    OWN.append(engine)
    return engine


def close(engine: Engine) -> None:
    """Ends the process that decodes its images."""
    if engine.images is not None:
        engine.images.close()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OWN:
        close(OWN.pop())


@pytest.fixture(scope="module")
def engine_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """An engine of a family. Shared: each test drops the models it creates."""
    root, engines = tmp_path_factory.mktemp("images"), dict[str, Engine]()

    def get(family: str) -> Engine:
        if family not in engines:
            engines[family] = engine_of(write_image_model(root / family, family))
            OWN.remove(engines[family])
        return engines[family]

    yield get
    for engine in engines.values():
        close(engine)


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


def few_tokens(family: str, engine_on: Callable[[str], Engine], **settings: Any) -> Engine:
    """Another engine on the same model."""
    return engine_of(engine_on(family).settings.folder, **settings)


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3_5"])
def test_images_of_equal_size_share_neither_pages_nor_states(
    family: str, engine_on: Callable[[str], Engine]
) -> None:
    """Placeholders of all images are the same token."""
    engine = few_tokens(family, engine_on)
    before, after = text(20, 1), text(20, 2)

    def ask(chunks: Sequence[Chunk]) -> tuple[int, np.ndarray]:
        (answer,) = sample(engine, [request(chunks, max_tokens=5, seed=2, stop=[])])
        return answer.prompt_cache_hit_tokens or 0, answer.sequences[0].logprobs_np

    first, second = ([before, picture(6, 8, seed), after] for seed in (1, 2))
    assert ask(first)[0] == 0
    hits, found = ask(second)
    # A page has 16 tokens: of the second only the one before its image is known. A recurrent state
    # is kept behind a whole prompt only, so here it is not used at all.
    assert hits == (0 if family in HYBRIDS else 16)
    fresh = few_tokens(family, engine_on, prefix_cache=False)
    (alone,) = sample(fresh, [request(second, max_tokens=5, seed=2, stop=[])])
    np.testing.assert_allclose(found, alone.sequences[0].logprobs_np, atol=tolerance(family))
    # The same image again, by the same and by another owner.
    hits, again = ask(first)
    assert hits == 80
    (one,) = sample(fresh, [request(first, max_tokens=5, seed=2, stop=[])])
    np.testing.assert_allclose(again, one.sequences[0].logprobs_np, atol=tolerance(family))


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "Qwen3_5"])
def test_chunks_that_end_in_an_image_preemption_and_shared_prompts_change_no_result(
    family: str, engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """A small cache and small steps, against an engine that runs one request after another."""
    small = few_tokens(family, engine_on, kv_tokens=330, max_batch_tokens=20, max_sequences=5)
    large = few_tokens(family, engine_on, prefix_cache=False)
    adapter = random_adapter(large, tmp_path / "adapter")
    start = (text(6, 1), picture(6, 9, 1), text(2, 3))
    prompts = [
        start,
        (*start, text(20, 4)),
        (*start, picture(4, 8, 2), text(9, 5)),
        (text(6, 1), picture(6, 9, 3), text(30, 6)),
        (text(30, 7),),
    ]
    requests = [request(each, samples=3, max_tokens=30, seed=4, stop=[]) for each in prompts]
    adapters = [None, None, None, adapter, None]
    found = sample(small, requests, adapters)
    assert max(answer.prompt_cache_hit_tokens or 0 for answer in found) >= 48
    for one, which, answer in zip(requests, adapters, found, strict=True):
        (alone,) = sample(large, [one], [which])
        for mine, wanted in zip(answer.sequences, alone.sequences, strict=True):
            assert mine.tokens == wanted.tokens
            np.testing.assert_allclose(mine.logprobs_np, wanted.logprobs_np, atol=tolerance(family))


def test_preempted_sequences_keep_their_own_images(engine_on: Callable[[str], Engine]) -> None:
    """All are computed again, from images of equal size behind the same text."""
    engine = few_tokens("Qwen3VL", engine_on)
    prompts = [[text(6, 1), picture(6, 9, seed), text(9, 2)] for seed in (1, 2)]
    for ticket, chunks in enumerate(prompts):
        engine.submit(ticket, request(chunks, max_tokens=40, seed=3, stop=[]), adapter=None)
    engine.advance()
    assert engine._sampler is not None
    engine._sampler.scheduler.preempt_all()  # type: ignore[attr-defined]
    found = {}
    while engine.sampling:
        found |= {each.ticket: each.outcome for each in engine.advance()}
    alone = few_tokens("Qwen3VL", engine_on, prefix_cache=False)
    for ticket, chunks in enumerate(prompts):
        (wanted,) = sample(alone, [request(chunks, max_tokens=40, seed=3, stop=[])])
        np.testing.assert_allclose(
            found[ticket].sequences[0].logprobs_np, wanted.sequences[0].logprobs_np, atol=1e-5
        )


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VLMoe"])
def test_prompt_logprobs_are_of_text_only(family: str, engine_on: Callable[[str], Engine]) -> None:
    engine = engine_on(family)
    chunks = ROWS[3]
    is_image = np.array(ids_of(chunks)) == PLACEHOLDER
    (answer,) = sample(
        engine,
        [
            request(
                chunks, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2, temperature=0
            )
        ],
    )
    expected = logprobs_of(engine.settings.folder, chunks)
    found = answer.prompt_logprobs_np
    assert found is not None
    np.testing.assert_array_equal(np.isnan(found[1:]), is_image[1:])
    np.testing.assert_allclose(found[1:][~is_image[1:]], expected[~is_image[1:]], atol=1e-5)
    top = answer.topk_prompt_logprobs_np
    assert top is not None
    best = top.logprobs[1:, 0]
    assert (best[~is_image[1:]] >= expected[~is_image[1:]] - 1e-5).all()
    assert (top.token_ids[1:][is_image[1:]] == EMPTY_TOKEN).all()


def test_features_are_kept_by_content_for_one_owner(
    engine_on: Callable[[str], Engine],
) -> None:
    engine = few_tokens("Qwen3VL", engine_on)
    vision = engine.model.vision
    assert vision is not None
    began = vision.computed

    def ask(owner: str, *seeds: int) -> int:
        before = vision.computed
        for ticket, seed in enumerate(seeds):
            # Different texts, so that no page is shared.
            chunks = [text(3, ticket), picture(2, 3, seed), text(2)]
            engine.submit(ticket, request(chunks, max_tokens=1), adapter=None, owner=owner)
        while engine.sampling:
            engine.advance()
        return vision.computed - before

    assert ask("a", 1, 1, 2) == 2
    assert ask("b", 1) == 1
    assert ask("a", 2, 1) == 0
    # Six features of each image, for the input and two layers, in float32.
    vision.max_kept_bytes = 2 * 6 * 3 * 32 * 4
    # Room for two: the third takes the place of the second, which is read again.
    assert ask("a", 3, 2, 3) == 2
    assert ask("a", 1) == 1
    engine.create("m", LoraConfig(rank=2), AdamOptimizerConfig())
    data = [datum_of([text(3, seed), picture(2, 3, 4), text(4, seed)]) for seed in range(3)]
    before = vision.computed
    engine.run_pass("m", work(data), backward=True)
    engine.run_pass("m", work(data), backward=True)
    assert vision.computed - before == 1
    assert began == 1, "the check at start reads an image"


def test_text_without_images_is_computed_as_by_a_text_model(
    engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """A folder without preprocessor_config.json: served as text, with the same numbers."""
    engine = engine_on("Qwen3VL")
    shutil.copytree(engine.settings.folder, tmp_path / "m")
    (tmp_path / "m" / "preprocessor_config.json").unlink()
    text_only = engine_of(tmp_path / "m")
    assert text_only.model.vision is None
    assert text_only.plan.images == 0
    assert text_only.model.size_bytes < engine.model.size_bytes
    asked = [request([text(40, 1)], max_tokens=10, seed=1, stop=[])]
    ((found,), (expected,)) = (sample(each, asked) for each in (engine, text_only))
    np.testing.assert_allclose(
        found.sequences[0].logprobs_np, expected.sequences[0].logprobs_np, atol=1e-6
    )
    with pytest.raises(UserFailure, match=r"prompt: this model's folder has no preproc.*json"):
        text_only.submit(9, request([picture(2, 2), text(1)]), adapter=None)
    # The places of images and of text are the same tokens for a model that knows no images.
    row = [text(4), EncodedTextChunk([PLACEHOLDER] * 4), text(4, 2)]
    ((found,), (expected,)) = (
        sample(each, [request(row, max_tokens=3, seed=1, stop=[])]) for each in (engine, text_only)
    )
    np.testing.assert_allclose(
        found.sequences[0].logprobs_np, expected.sequences[0].logprobs_np, atol=1e-6
    )


def test_published_folders_are_the_same_models(
    engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """A config without a part for text (Qwen2.5-VL), and experts the other way around (Qwen3-VL)."""
    flat, turned = tmp_path / "Qwen2_5_VL", tmp_path / "Qwen3VLMoe"
    for folder in (flat, turned):
        shutil.copytree(engine_on(folder.name).settings.folder, folder)
    config = json.loads((flat / "config.json").read_text())
    text_part = config.pop("text_config")
    rope = text_part.pop("rope_parameters")
    config |= {key: value for key, value in text_part.items() if key != "model_type"}
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (flat / "config.json").write_text(json.dumps(config))
    file = turned / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            assert tensor.shape[1] != tensor.shape[2]
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    asked = [request(ROWS[0], max_tokens=5, seed=1, stop=[])]
    for folder in (flat, turned):
        usual, published = engine_on(folder.name), engine_of(folder)
        ((one,), (other,)) = (sample(each, asked) for each in (usual, published))
        np.testing.assert_allclose(
            one.sequences[0].logprobs_np, other.sequences[0].logprobs_np, atol=1e-6
        )
        shapes = [read_shape(each.settings.folder) for each in (usual, published)]
        assert shapes[0].tower == shapes[1].tower
        assert shapes[0].all_parameters == shapes[1].all_parameters
        assert shapes[0].targets == shapes[1].targets


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"patch_size": 6}, "this model's image processor has patch_size = 6, but .* has 4"),
        ({"image_processor_type": "Other"}, "this model's image processor is Other"),
    ],
)
def test_a_folder_whose_images_cannot_be_cut_is_served_as_text(
    change: dict[str, Any], says: str, engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    shutil.copytree(engine_on("Qwen3VL").settings.folder, tmp_path / "m")
    file = tmp_path / "m" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    engine = engine_of(tmp_path / "m")
    with pytest.raises(UserFailure, match=says):
        engine.submit(9, request([picture(2, 2), text(1)]), adapter=None)
    assert read_shape(tmp_path / "m").tower is None


def test_the_newer_file_of_transformers_says_how_to_cut_too(
    engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    shutil.copytree(engine_on("Qwen3VL").settings.folder, tmp_path / "m")
    file = tmp_path / "m" / "preprocessor_config.json"
    newer = {"image_processor": json.loads(file.read_text())}
    (tmp_path / "m" / "processor_config.json").write_text(json.dumps(newer))
    file.unlink()
    assert (
        read_shape(tmp_path / "m").tower == read_shape(engine_on("Qwen3VL").settings.folder).tower
    )


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (DmelChunk(dmel=b"\0\1\3"), r"chunks\[1\]: is sound"),
        (
            ImageAssetPointerChunk(format="png", location="x"),
            r"chunks\[1\]: names an image by its location",
        ),
        (ImageChunk(data=b"nothing", format="png"), r"chunks\[1\]: "),
        (
            picture(2, 3).model_copy(update={"expected_tokens": 7}),
            r"chunks\[1\]: .*7.*6",
        ),
        (picture(8, 8), r"prompt: has 65 tokens; the model's context is 60"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_runs(
    chunk: Chunk, says: str, engine_on: Callable[[str], Engine]
) -> None:
    engine = engine_on("Qwen3VL")
    limits = replace(engine.limits, max_context_length=60)
    assert engine.images is not None
    images = RequestImages(engine.images._readers, limits)
    with pytest.raises(UserFailure, match=says):
        images.prepare([NamedInput("prompt", ModelInput([text(1), chunk]))])
    if "context" not in says:
        with pytest.raises(UserFailure, match=says.replace(r"\[1\]", r"\[0\]")):
            engine.submit(9, request([chunk]), adapter=None)
        engine.create("m", LoraConfig(rank=2), AdamOptimizerConfig())
        datum = Datum(ModelInput([text(1), chunk]), {"target_tokens": [1, 2]})
        with pytest.raises(UserFailure, match=rf"data\[0\]\.model_input\.{says}"):
            engine.run_pass("m", work([datum]), backward=True)
        engine.drop("m")


def test_adapters_are_on_the_text_part_alone(
    engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """Under the names of the hosted service, which fit with and without a tower."""
    engine = engine_on("Qwen3VLMoe")
    adapter = random_adapter(engine, tmp_path / "adapter")
    names = load_file(adapter / "adapter_model.safetensors").keys()
    assert not [name for name in names if "visual" in name or "language_model" in name]
    prefix = "base_model.model.model.layers.0"
    assert f"{prefix}.self_attn.q_proj.lora_A.weight" in names
    assert f"{prefix}.mlp.experts.w1.lora_A.weight" in names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3_5"])
def test_wrong_positions_of_an_image_are_refused_at_start(
    family: str,
    dtype: str,
    engine_on: Callable[[str], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding to 16 bits changes the logits of a few tokens as much as wrong positions do."""
    folder, right = engine_on(family).settings.folder, ImagePlaces.of

    def wrong(images: Sequence[PlacedImage], merge_size: int) -> ImagePlaces:
        places = right(images, merge_size)
        time, row, column = places.positions_3N
        return replace(places, positions_3N=np.stack([time, column, row]))

    monkeypatch.setattr(ImagePlaces, "of", wrong)
    with pytest.raises(UnsupportedModel, match=r"give the tokens of an image.* other positions"):
        engine_of(folder, dtype=dtype)


def test_the_memory_of_images_is_planned(engine_on: Callable[[str], Engine]) -> None:
    engine = engine_on("Qwen3VL")
    shape = read_shape(engine.settings.folder)
    assert shape.tower == engine.model.vision.shape  # type: ignore[union-attr]
    assert shape.tower is not None
    # 32 numbers for the input of the decoder and for two of its layers.
    assert shape.tower.feature_bytes(4) == 3 * 32 * 4
    assert engine.plan.images == 4096 * shape.tower.image_bytes(4)
    assert "images of 4,096 tokens" in engine.plan.table()
    assert sum(size for _, size in engine.plan.parts) == engine.plan.total


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VLMoe"])
def test_peft_opens_an_exported_adapter(
    family: str, engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """With the names of the whole model, and none in the tower."""
    from peft import PeftModel

    engine = engine_on(family)
    folder = engine.settings.folder
    adapter = random_adapter(engine, tmp_path / "adapter", rank=3)
    # All that it needs of the base model: no weights.
    configs = tmp_path / "configs"
    configs.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(folder / name, configs)
    exported = tmp_path / "exported"
    found = CliRunner().invoke(
        command,
        ["export", str(adapter), "--as", "peft", "--base", str(configs), "-o", str(exported)],
    )
    assert found.exit_code == 0, found.output
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, exported)
    assert not [name for name, _ in model.named_parameters() if "visual" in name and "lora" in name]
    chunks = ROWS[0]
    with torch.no_grad():
        logits = model(**arguments_of(folder, chunks)).logits[0, :-1]
    targets = torch.tensor(datum_of(chunks).loss_fn_inputs["target_tokens"].to_numpy())
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    model_from(engine, "m", adapter)
    (output,) = engine.run_pass("m", work([datum_of(chunks)]), backward=False).loss_fn_outputs
    engine.drop("m")
    np.testing.assert_allclose(output["logprobs"].to_numpy(), expected, atol=1e-5)


def test_gradients_are_those_of_autograd_through_merged_weights(
    engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """With features that are added behind the first layers."""
    engine = engine_on("Qwen3VL")
    adapter = random_adapter(engine, tmp_path / "adapter", rank=3)
    chunks = ROWS[3]
    datum = datum_of(chunks)
    model_from(engine, "m", adapter)
    engine.run_pass("m", work([datum_of(ROWS[0]), datum]), backward=True)
    engine.clear_gradients("m")
    engine.run_pass("m", work([datum]), backward=True)
    found = gradients(engine, "m", tmp_path / "snapshot")
    engine.drop("m")

    folder = engine.settings.folder
    leaves = {
        name: tensor.requires_grad_()
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    reference = untouched(folder)
    weights = {}
    for name, (A, B) in from_peft_names(leaves).items():
        path = name.replace("model.layers", "model.language_model.layers") + ".weight"
        weights[path] = reference.get_parameter(path).detach() + 32 / 3 * B @ A
    arguments = arguments_of(folder, chunks)
    logits = torch.func.functional_call(reference, weights, (), arguments).logits[0, :-1]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
    factors = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy())
    (-(factors * logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.any(), name
        assert float((found[name] - leaf.grad).norm()) < 1e-4 * float(leaf.grad.norm()), name

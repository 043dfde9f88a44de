"""Checkpoint folders are written atomically and refused with a reason if they do not fit."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkex.durable_files import atomic_folder
from tinkex.engine import Engine
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import AdamOptimizerConfig, LoraConfig


@pytest.fixture
def model(engine: Engine) -> Iterator[str]:
    engine.create("m", LoraConfig(rank=4, seed=1), AdamOptimizerConfig())
    yield "m"
    engine.drop("m")


@pytest.fixture
def saved(engine: Engine, model: str, tmp_path: Path) -> Path:
    engine.save(model, tmp_path / "saved", optimizer=True)
    return tmp_path / "saved"


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_checkpoint_is_never_overwritten(engine: Engine, model: str, saved: Path) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(FileExistsError, match="never overwritten"):
        engine.save(model, saved, optimizer=False)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        (part / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), atomic_folder(tmp_path / "new") as part:
        fail(part)
    assert not list(tmp_path.iterdir())


def test_the_size_is_that_of_the_files(engine: Engine, model: str, tmp_path: Path) -> None:
    size = engine.save(model, tmp_path / "deep" / "down" / "new", optimizer=False)
    files = list((tmp_path / "deep" / "down" / "new").iterdir())
    assert size == sum(file.stat().st_size for file in files)
    assert {file.name for file in files} == {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=8), r"saved with rank 4, but this model has rank 8.*rank 4"),
        (
            LoraConfig(rank=4, train_mlp=False),
            r"adapts different layers than this model: it has 6 more, such as model.layers.0.mlp",
        ),
        (LoraConfig(rank=4, train_unembed=False), "it has 1 more, such as lm_head"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(
    engine: Engine, saved: Path, lora: LoraConfig, message: str
) -> None:
    engine.create("other", lora, AdamOptimizerConfig())
    try:
        with pytest.raises(UserFailure, match=message):
            engine.load("other", saved, optimizer=False)
    finally:
        engine.drop("other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_rslora": True}, "use_rslora = True, which is not supported"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
        ({"lora_alpha": 16}, "has lora_alpha 16; this server trains with lora_alpha 32"),
        ({"r": "four"}, "r = 'four'"),
        ({"r": 5}, "says rank 5"),
    ],
)
def test_an_unsupported_peft_config_is_refused(
    engine: Engine, model: str, saved: Path, changes: dict[str, object], message: str
) -> None:
    edit_config(saved, **changes)
    with pytest.raises(UserFailure, match=message):
        engine.load(model, saved, optimizer=False)


def test_a_sampler_checkpoint_has_no_optimizer_state(
    engine: Engine, model: str, tmp_path: Path
) -> None:
    engine.save(model, tmp_path / "sampler", optimizer=False)
    with pytest.raises(UserFailure, match="has no optimizer state"):
        engine.load(model, tmp_path / "sampler", optimizer=True)


def test_a_refused_load_changes_nothing(engine: Engine, model: str, saved: Path) -> None:
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(3, 4)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] += 1
    save_file(tensors, file)
    before = engine._adapters[model].master.clone()
    with pytest.raises(UserFailure, match="The checkpoint belongs to another base model"):
        engine.load(model, saved, optimizer=False)
    assert torch.equal(engine._adapters[model].master, before)


def test_a_folder_that_is_not_a_checkpoint_is_refused(
    engine: Engine, model: str, tmp_path: Path
) -> None:
    with pytest.raises(UserFailure, match=r"has no adapter_config.json; it is not a checkpoint"):
        engine.load(model, tmp_path / "nothing", optimizer=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    with pytest.raises(UserFailure, match="cannot be read"):
        engine.load(model, tmp_path / "broken", optimizer=False)


def test_a_truncated_file_is_refused(engine: Engine, model: str, saved: Path) -> None:
    file = saved / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserFailure, match=r"adapter_model.safetensors cannot be read"):
        engine.load(model, saved, optimizer=False)


def test_tensors_other_than_lora_pairs_are_refused(engine: Engine, model: str, saved: Path) -> None:
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"] = torch.ones(2)
    save_file(tensors, file)
    with pytest.raises(UserFailure, match="only lora_A and lora_B"):
        engine.load(model, saved, optimizer=False)


SAVES_FOREVER = """
import sys, itertools
from pathlib import Path
import torch
from tinkex.engine import Engine, EngineSettings
from tinkex.wire.training import AdamOptimizerConfig, LoraConfig

torch.set_num_threads(1)
model, out = Path(sys.argv[1]), Path(sys.argv[2])
engine = Engine(EngineSettings(name="tiny", folder=model, device="cpu", kv_tokens=64))
engine.create("m", LoraConfig(rank=64, seed=1), AdamOptimizerConfig())
for number in itertools.count():
    engine.save("m", out / str(number), optimizer=True)
"""


def test_a_process_killed_while_saving_leaves_no_partial_checkpoint(
    engine: Engine, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", SAVES_FOREVER, str(tiny_folder), str(out)]
    with subprocess.Popen(command) as child:
        try:
            # Some saves are complete; kill the process in the middle of the next.
            while not (out / "2").exists() or not list(out.glob(".*.part/*.safetensors")):
                assert child.poll() is None
                time.sleep(0.0005)
        finally:
            child.kill()
    seen = [folder for folder in out.iterdir() if not folder.name.startswith(".")]
    assert len(seen) >= 3
    engine.create("after", LoraConfig(rank=64), AdamOptimizerConfig())
    try:
        for folder in seen:
            engine.load("after", folder, optimizer=True)
        # Leftovers of the killed save do not interfere.
        engine.save("after", out / str(len(seen)), optimizer=True)
    finally:
        engine.drop("after")

"""Checkpoint folders are written atomically and refused with a reason if they do not fit."""

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkex.durable_files import atomic_folder
from tinkex.engine import Engine
from tinkex.engine.adapters import adapter_files, checkpoints
from tinkex.engine.sampling.sampler import read_sampler_adapter
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
        ({"alpha_pattern": {"q_proj": 64}}, "All layers must have the same alpha / rank"),
        ({"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 32}}, "the same alpha / rank"),
        ({"rank_pattern": [1]}, r"rank_pattern = \[1\]"),
        ({"r": "four"}, "r = 'four'"),
        ({"r": 10**400}, "both must be numbers"),
        ({"r": 0}, "r at least 1"),
        ({"lora_alpha": 10**400}, "both must be numbers"),
        ({"peft_type": "x" * 10**6}, r"peft_type \.\.\. is not LORA|peft_type 'x"),
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


def replaced(folder: Path, name: str, contents: bytes) -> Path:
    (folder / name).write_bytes(contents)
    return folder


def header(**tensors: object) -> bytes:
    """A safetensors file with this header and eight bytes of numbers."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


def _of(shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}


A_NAME = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\xff" * 8,  # a header of 2**64 bytes
        struct.pack("<Q", 99_000_000),  # a header that does not follow
        header(**{A_NAME: _of([2**40, 2**40])}),
        header(**{A_NAME: _of([-2])}),
        header(**{A_NAME: _of([2**62])}),
        header(**{A_NAME: _of([1, 1])}),
        header(**{A_NAME: _of([0, 2**64 - 1])}),
        header(**{A_NAME: _of([1] * 100_000 + [2])}),
        header(**{A_NAME: _of([2], "F4")}),
        header(**{A_NAME: _of([2], "F" * 1000)}),
        header(**{A_NAME: ["F32", [2], [0, 8]]}),
    ],
    ids=[
        *("empty", "endless", "cut off", "huge", "negative", "overflow", "too short"),
        *("nothing times too much", "dimensions", "four bits", "no format", "no object"),
    ],
)
def test_a_hostile_file_is_refused(
    contents: bytes, engine: Engine, model: str, saved: Path
) -> None:
    replaced(saved, "adapter_model.safetensors", contents)
    with pytest.raises(UserFailure, match=r"adapter_model.safetensors cannot be read") as found:
        engine.load(model, saved, optimizer=False)
    assert len(str(found.value)) < 1000


def _two_names(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.unembed_tokens.lora_A.weight"] = torch.ones(4, 64)


def _long_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["x" * 10_000 + ".lora_A.weight"] = torch.ones(1)


def _long_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"m.experts.{'9' * 400}.up_proj.lora_A.weight"] = torch.ones(1, 1)
    tensors[f"m.experts.{'9' * 400}.up_proj.lora_B.weight"] = torch.ones(1, 1)


def _one_dimension(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A_NAME] = torch.ones(4)


def _scalar(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A_NAME] = torch.tensor(1.0)


def _eight_bits(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A_NAME] = tensors[A_NAME].to(torch.float8_e4m3fn)


def _complex(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A_NAME] = tensors[A_NAME].to(torch.complex64)


def _wide_expert(tensors: dict[str, torch.Tensor]) -> None:
    for letter in "AB":
        tensors[f"m.experts.0.up_proj.lora_{letter}.weight"] = torch.ones(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_two_names, "has lora_A of lm_head under two names"),
        (_long_name, r"has a tensor .*only lora_A and lora_B"),
        (_long_number, r"m\.experts\.9+\.up_proj"),
        (_one_dimension, r"lm_head has matrices of shape \[4\] and"),
        (_scalar, r"lm_head has matrices of shape \[\] and"),
        (_eight_bits, r"lm_head.* has numbers of type torch.float8"),
        (_complex, r"lm_head.* has numbers of type torch.complex64"),
        (_wide_expert, r"experts.w3"),
    ],
)
def test_hostile_tensors_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    engine: Engine,
    model: str,
    saved: Path,
) -> None:
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    before = engine._adapters[model].master.clone()
    with pytest.raises(UserFailure, match=message) as found:
        engine.load(model, saved, optimizer=False)
    assert len(str(found.value)) < 1000
    with pytest.raises(UserFailure, match=message):
        read_sampler_adapter(engine.model, saved)
    assert torch.equal(engine._adapters[model].master, before)


def test_many_tensors_of_nothing_are_refused(
    engine: Engine, model: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a few bytes of the file, and a thousand in memory."""
    monkeypatch.setattr(adapter_files, "MAX_TENSORS", 100)
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    replaced(
        saved, "adapter_model.safetensors", header(**{f"{n}.lora_A": nothing for n in range(101)})
    )
    with pytest.raises(UserFailure, match="has 101 tensors; at most 100 are read"):
        engine.load(model, saved, optimizer=False)


def test_a_config_without_end_is_refused(engine: Engine, model: str, saved: Path) -> None:
    for contents, message in (
        (b"[" * 100_000, "adapter_config.json cannot be read"),
        (b" " * (5 << 20), "adapter_config.json has 5.2 MB; at most 4.2 MB are read"),
        (b'{"r": ' + b"9" * 5000 + b"}", "adapter_config.json cannot be read"),
        (b'{"r": NaN, "lora_alpha": Infinity}', "r = nan and lora_alpha = inf; both must be"),
        (b'{"peft_type": ' + b"[" * 900 + b"]" * 900 + b"}", r"peft_type \[\[.* is not LORA"),
        (b"\xff", "adapter_config.json cannot be read"),
    ):
        replaced(saved, "adapter_config.json", contents)
        with pytest.raises(UserFailure, match=message) as found:
            engine.load(model, saved, optimizer=False)
        assert len(str(found.value)) < 500


def test_folders_in_place_of_files_are_refused(engine: Engine, model: str, saved: Path) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (saved / name).unlink()
        (saved / name).mkdir()
        with pytest.raises(UserFailure, match=f"{name} cannot be read"):
            engine.load(model, saved, optimizer=False)


@pytest.mark.parametrize("step", [torch.tensor(math.nan), torch.tensor(-1), torch.ones(2)])
def test_a_number_of_steps_that_is_none_is_refused(
    step: torch.Tensor, engine: Engine, model: str, saved: Path
) -> None:
    file = saved / "optimizer.safetensors"
    save_file({**load_file(file), "step": step}, file, metadata={"optimizer": "adamw"})
    with pytest.raises(UserFailure, match="has no number of steps"):
        engine.load(model, saved, optimizer=True)


@pytest.mark.parametrize(
    ("name", "optimizer", "message"),
    [("x" * 10_000, "adamw", "has a tensor 'x"), ("m:x", "y" * 10_000, "state is of y")],
)
def test_a_hostile_optimizer_state_is_refused(
    name: str, optimizer: str, message: str, engine: Engine, model: str, saved: Path
) -> None:
    file = saved / "optimizer.safetensors"
    tensors = {**load_file(file), name: torch.ones(1)}
    save_file(tensors, file, metadata={"optimizer": optimizer})
    with pytest.raises(UserFailure, match=message) as found:
        engine.load(model, saved, optimizer=True)
    assert len(str(found.value)) < 500


@pytest.mark.parametrize("name", ["adapter_model", "optimizer", "gradients"])
def test_a_snapshot_that_does_not_fit_leaves_no_model(
    name: str, engine: Engine, model: str, tmp_path: Path
) -> None:
    engine._adapters[model].grad.fill_(1.0)
    checkpoints.write(engine.snapshot_files(model), tmp_path / "snapshot")
    file = tmp_path / "snapshot" / f"{name}.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "q_proj.lora_A" in key)
    tensors[key] = torch.ones(2, 2)
    save_file(tensors, file, metadata={"optimizer": "adamw"})
    with pytest.raises(UserFailure, match=r"\[2, 2\]"):
        engine.restore("new", tmp_path / "snapshot")
    assert not engine.has("new")


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

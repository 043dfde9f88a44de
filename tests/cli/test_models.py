"""`tinkex models`: which models fit this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tinkex.cli.command_group import command
from tinkex.models.line_up import line_up
from tinkex.testing import write_tiny_model

#: What NVIDIA's program prints on a machine with two GPUs, and on one whose GPU has no own memory.
TWO_GPUS = "NVIDIA H200, 143771, 143100\nNVIDIA H200, 143771, 20000\n"
SHARED = "NVIDIA GB10, [N/A], [N/A]\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "my-model", arch="llama")


def models(*args: str | Path) -> Result:
    return CliRunner().invoke(command, ["models", *map(str, args)])


def found(*args: str | Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The machine, and the models by name."""
    result = models(*args, "--format", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    return answer, {model["name"]: model for model in answer["models"]}


def program(folder: Path, output: str) -> None:
    """A program in the place of NVIDIA's."""
    (folder / "output").write_text(output)
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\ncat {folder / 'output'}\n")
    file.chmod(0o755)


def test_a_folder_comes_before_the_line_up(tiny: Path) -> None:
    answer, rows = found(tiny, "--cpu")
    assert answer["machine"]["device"] == "cpu"
    assert answer["dtype"] == "float32"
    assert list(rows) == ["my-model", *(model.name for model in line_up())]
    mine = rows["my-model"]
    assert (mine["served"], mine["fits"], mine["model_type"]) == (True, True, "llama")
    assert 0 < (tiny / "model.safetensors").stat().st_size - mine["weights_bytes"] < 5000
    assert mine["adapter_training_bytes"] == 16 * mine["adapter_parameters"]
    assert mine["adapter_sampling_bytes"] == 4 * mine["adapter_parameters"]
    assert mine["trained"] == "attention (q k v o), MLP (gate up down), output"


def test_the_rank_and_the_format_count(tiny: Path) -> None:
    _, usual = found(tiny, "--cpu")
    _, other = found(tiny, "--cpu", "--rank", "8", "--dtype", "bfloat16")
    mine, theirs = usual["my-model"], other["my-model"]
    assert theirs["adapter_parameters"] == mine["adapter_parameters"] / 4
    assert theirs["adapter_training_bytes"] == 18 * theirs["adapter_parameters"]
    assert theirs["kv_bytes_per_token"] == mine["kv_bytes_per_token"] / 2


def test_what_fits_depends_on_the_machine() -> None:
    fits = {}
    for memory in ("24GB", "80", "139GiB", "2TB"):
        answer, rows = found("--gpu-memory", memory)
        assert answer["machine"]["device"] == "cuda"
        fits[memory] = {name for name, row in rows.items() if row["fits"]}
    assert fits["24GB"] < fits["80"] < fits["139GiB"] < fits["2TB"]
    assert "Qwen/Qwen3-8B" in fits["24GB"]
    assert "Qwen/Qwen3-30B-A3B" in fits["80"] - fits["24GB"]
    assert "openai/gpt-oss-120b" in fits["2TB"] - fits["139GiB"]
    # A model whose sizes are not public may be too large all the same.
    assert rows["zai-org/GLM-5.3"]["weights_bytes"] == 1_490_000_000_000
    assert found("--gpu-memory", "80GB")[1]["Qwen/Qwen3.5-397B-A17B"]["fits"] is False
    # Also a model with recurrent layers is divided.
    assert found("--gpu-memory", "48GB")[1]["Qwen/Qwen3.5-27B"]["gpus_needed"] == 2


def test_a_machine_with_gpus_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, TWO_GPUS)
    answer, _ = found()
    assert answer["machine"] == {
        "device": "cuda",
        "name": "NVIDIA H200",
        "free_bytes": 143100 * 2**20,
        "total_bytes": 143771 * 2**20,
    }
    assert answer["dtype"] == "bfloat16"
    assert found("--cpu")[0]["machine"]["device"] == "cpu"
    program(tmp_path, SHARED)
    assert found()[0]["machine"]["device"] == "cpu"


def test_a_folder_of_a_family_that_is_not_tested_may_be_served(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    for kind, served in (("apertus", None), ("cohere", False)):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(tiny / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        row = found(folder, "--cpu")[1][kind]
        assert row["served"] is served
        assert row["weights_bytes"]
        assert row["reason"]
    lines = models(tmp_path / "apertus", tmp_path / "cohere", "--cpu").stdout.splitlines()
    assert lines[1].split()[:3] == ["apertus", "maybe", "yes,"]
    assert lines[2].split()[:3] == ["cohere", "no", "-"]
    assert lines[2].endswith("scales its logits")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gpu-memory", "much"], "'much' is not a size; write 80GB or 139GiB"),
        (["--gpu-memory", "0GB"], "'0GB' is not a size"),
        (["--gpu-memory", "80GB", "--cpu"], "--cpu and --gpu-memory exclude each other"),
        (["--rank", "0"], "0 is not in the range 1<=x<=512"),
    ],
)
def test_mistakes_are_explained(args: list[str], says: str) -> None:
    result = models(*args)
    assert result.exit_code == 2
    assert says in result.output


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    for folder in (tmp_path, tmp_path / "nowhere"):
        result = models(folder)
        assert result.exit_code == 1
        assert f"{folder} has no config.json of a model" in result.output


def test_it_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from tinkex.cli.command_group import command\n"
        "command(['models', '--gpu-memory', '80GB'], standalone_mode=False)\n"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Qwen/Qwen3-30B-A3B" in ran.stdout

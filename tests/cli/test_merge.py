"""`tinkex merge`: from a folder, and from a checkpoint of a server."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from serving import TINY, Server
from tinkex import ServiceClient
from tinkex.cli.command_group import command
from tinkex.testing import write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tinkex.engine import Engine, EngineSettings
    from tinkex.wire.training import AdamOptimizerConfig, LoraConfig

    engine = Engine(
        EngineSettings(name=str(tiny_model), folder=tiny_model, device="cpu", kv_tokens=64)
    )
    engine.create("m", LoraConfig(rank=2), AdamOptimizerConfig())
    folder = tmp_path_factory.mktemp("merge") / "adapter"
    engine.save("m", folder, optimizer=False)
    return folder


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, ["merge", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_folder_is_merged_with_the_base_it_names(adapter: Path, tmp_path: Path) -> None:
    status, output = run(adapter, tmp_path / "out")
    assert status == 0, output
    assert f"{tmp_path / 'out'}: " in output
    assert "float32" in output
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_problems_are_reported_with_advice(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    other = write_tiny_model(tmp_path / "other", arch="qwen3")
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"qwen3"', '"qwen3_moe"')
    )
    for arguments, message in (
        ((adapter, tmp_path / "taken"), "hint: Name a new folder"),
        ((tmp_path / "nothing", tmp_path / "out"), "is not a checkpoint"),
        (
            (adapter, tmp_path / "out", "--base", other),
            "mlp.experts.down_proj: they would be random",
        ),
        ((adapter, tmp_path / "out", "--base", "no/such"), "no/such"),
        (("tinker://a/weights/b", tmp_path / "out", "--data", tmp_path / "no"), "--data DIR"),
    ):
        status, output = run(*arguments)
        assert status == 1, output
        assert message in output, output
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(120)
def test_a_tinker_path_is_found_in_the_data_folder(
    server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    with ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(base_model=TINY, rank=4)
        path = training.save_state("first").result().path
    arguments = (path, tmp_path / "out", "--base", tiny_model, "--data", server.data)
    status, output = run(*arguments)  # while the server runs
    assert status == 0, output
    assert f"merged with {path}," in output  # as it was typed, not the name of a folder
    (tmp_path / "sibling").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "sibling").stat().st_mode}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    status, output = run(f"{path}-other", tmp_path / "no", "--data", server.data)
    assert status == 1
    assert "there is no checkpoint" in output
    status, output = run("tinker://nonsense", tmp_path / "no", "--data", server.data)
    assert status == 1
    assert output.startswith("error: ")

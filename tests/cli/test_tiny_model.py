"""`tinkex tiny-model` from the command line."""

from click.testing import CliRunner

from tinkex.cli.tiny_model import command
from tinkex.models.resolve import describe, resolve


def test_it_writes_a_folder_that_can_be_served(tmp_path):
    folder = tmp_path / "tiny"
    result = CliRunner().invoke(command, [str(folder), "--arch", "llama", "--seed", "3"])
    assert result.exit_code == 0, result.output
    facts = describe(resolve(f"some/name={folder}"))
    assert (facts.name, facts.arch, facts.eos_token_ids) == ("some/name", "llama", (2,))
    assert f"tinkex serve {folder}" in result.output


def test_it_leaves_a_folder_with_files_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 1
    assert "not empty" in result.output
    assert "--force" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_force_writes_beside_what_is_there(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    result = CliRunner().invoke(command, [str(tmp_path), "--force"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "config.json").is_file()


def test_an_unknown_architecture_is_answered_with_the_known_ones(tmp_path):
    result = CliRunner().invoke(command, [str(tmp_path), "--arch", "gpt2"])
    assert result.exit_code == 2
    assert "qwen3" in result.output
    assert "llama" in result.output

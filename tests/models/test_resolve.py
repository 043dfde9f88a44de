"""Resolving a model spec to a folder."""

import json
import os
import subprocess
import sys

import pytest

from tinkex.models.resolve import (
    DEFAULT_MODEL,
    ModelNotFound,
    ModelSource,
    describe,
    hub_cache,
    nearest,
    resolve,
)


def write_model(folder, **config):
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 10, **config}
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_snapshot(hub, name, commit, *, main=True):
    repository = hub / f"models--{name.replace('/', '--')}"
    if main:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return write_model(repository / "snapshots" / commit)


@pytest.fixture
def env(tmp_path):
    """A user's environment with an empty home."""
    return {"HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test contacts the hub. The library reads its environment variable once, at import."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_folder_is_served_under_its_name(tmp_path):
    folder = write_model(tmp_path / "my-model")
    assert resolve(str(folder)) == ModelSource(name="my-model", folder=folder)


@pytest.mark.parametrize(
    "spec", ["~nobody-of-this-name/model", "x" * 300, "a" * 300 + "=b", "a\0b"]
)
def test_a_name_that_no_folder_can_have_is_an_error(spec, env):
    with pytest.raises(ModelNotFound):
        resolve(spec, env=env)


def test_only_the_config_is_looked_for_where_that_is_enough(tmp_path, env, monkeypatch):
    """A cache that has it alone is used, and the hub is not asked for weights."""
    name, asked = "Org/Large", []

    def download(repository, *, allow_patterns, cache_dir):
        asked.append(allow_patterns)
        folder = cache_dir / f"models--{repository.replace('/', '--')}" / "snapshots" / "c1"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = resolve(name, env=env, config_only=True)
    assert [file.name for file in found.folder.iterdir()] == ["config.json"]
    assert resolve(name, env=env, config_only=True) == found
    assert asked == [["config.json", "preprocessor_config.json", "processor_config.json"]]
    # It is no model that can be served.
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelNotFound, match=r"snapshot c1 is incomplete: no tokenizer\.json"):
        resolve(name, env=env)
    folder = tmp_path / "here"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve(str(folder), config_only=True)


def test_an_alias_gives_a_folder_any_name(tmp_path):
    folder = write_model(tmp_path / "my-model")
    assert resolve(f"Qwen/Qwen3-8B={folder}") == ModelSource(name="Qwen/Qwen3-8B", folder=folder)


def test_an_alias_may_point_to_a_name(tmp_path, env):
    snapshot = write_snapshot(tmp_path / "hf" / "hub", "some/model", "abc")
    assert resolve("Qwen/Qwen3-8B=some/model", env=env).folder == snapshot


@pytest.mark.parametrize("spec", ["=folder", "name="])
def test_an_incomplete_alias_is_refused(spec, env):
    with pytest.raises(ModelNotFound, match="NAME=FOLDER"):
        resolve(spec, env=env)


@pytest.mark.parametrize("spec", ["/nowhere/model", "./model", "a=../model", "~/no/model"])
def test_a_missing_path_is_not_treated_as_a_name(spec, env):
    with pytest.raises(ModelNotFound, match=r"There is no folder .* Check the path"):
        resolve(spec, env=env)


def test_a_name_is_found_in_the_hugging_face_cache(tmp_path, env):
    hub = tmp_path / "hf" / "hub"
    write_snapshot(hub, "some/model", "old", main=False)
    newest = write_snapshot(hub, "some/model", "new")
    assert resolve("some/model", env=env) == ModelSource(name="some/model", folder=newest)
    assert resolve("some/model:peft:262144", env=env).name == "some/model"


def test_the_hub_cache_takes_precedence_over_the_embedded_model(tmp_path, env):
    snapshot = write_snapshot(tmp_path / "hf" / "hub", DEFAULT_MODEL, "abc")
    assert resolve(DEFAULT_MODEL, env=env).folder == snapshot


def test_an_incomplete_snapshot_is_skipped(tmp_path, env):
    hub = tmp_path / "hf" / "hub"
    whole = write_snapshot(hub, "some/model", "whole", main=False)
    partial = write_snapshot(hub, "some/model", "partial")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (partial / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (partial / "model-1.safetensors").write_bytes(b"")
    assert resolve("some/model", env=env).folder == whole
    (whole / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="incomplete"):
        resolve("some/model", env=env)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "HOME": "/d"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
    ],
)
def test_the_hub_cache_is_where_huggingface_hub_has_it(env, expected):
    assert str(hub_cache(env)) == expected
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    clean = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == expected


def test_an_unknown_name_says_what_was_tried_and_what_to_do(env):
    with pytest.raises(ModelNotFound) as caught:
        resolve("Qwen/Qwen9-1B", env=env)
    message = str(caught.value)
    for part in (
        "a folder 'Qwen/Qwen9-1B'",
        "the Hugging Face cache",
        "the embedded model",
        "the hub",
        "tinkex serve Qwen/Qwen9-1B=FOLDER",
        "tinkex tiny-model",
    ):
        assert part in message


def test_a_similar_name_is_suggested(tmp_path, env):
    write_snapshot(tmp_path / "hf" / "hub", "Qwen/Qwen3-0.6B", "abc")
    with pytest.raises(ModelNotFound, match=r"Did you mean Qwen/Qwen3-0\.6B\?"):
        resolve("Qwen3-0.6b", env=env)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-135m", DEFAULT_MODEL),  # without its organization
        ("HuggingFaceTB/SmolLM2-135M", DEFAULT_MODEL),  # the base model's name
        ("mistral", None),
    ],
)
def test_similarity_ignores_case_and_organization(name, expected):
    assert nearest(name, [DEFAULT_MODEL]) == expected


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_says_what_is_missing(tmp_path, missing):
    folder = write_model(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelNotFound, match=missing.removeprefix("model")):
        resolve(str(folder))


def test_facts_come_from_the_config_files(tmp_path):
    folder = write_model(tmp_path / "m", eos_token_id=5, bos_token_id=1)
    source = resolve(str(folder))
    assert describe(source).eos_token_ids == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    facts = describe(source)
    assert facts.eos_token_ids == (5, 7)
    assert facts.bos_token_id == 1
    assert (facts.arch, facts.max_context_length, facts.vocab_size) == ("llama", 64, 10)


def test_a_config_without_a_language_model_is_refused(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelNotFound, match="max_position_embeddings"):
        describe(resolve(str(folder)))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelNotFound, match="not JSON"):
        describe(resolve(str(folder)))


def test_nothing_here_loads_torch():
    code = (
        "import sys; import tinkex.models.resolve, tinkex.models.tokenizer, tinkex.models.gguf; "
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'huggingface_hub', 'jinja2'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"

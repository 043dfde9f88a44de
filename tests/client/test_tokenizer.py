"""Which tokenizer belongs to a model."""

import pytest

import tinkex
from tinkex.client.tokenizer import LLAMA_MIRROR, load, tokenizer_id_of


@pytest.mark.parametrize(
    ("model", "said", "expected"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:tuned", None, "Qwen/Qwen3-8B"),
        ("org/model/variant", None, "org/model"),
        ("meta-llama/Llama-3.1-8B", None, LLAMA_MIRROR),
        ("moonshotai/Kimi-K2.5-Text-Only", None, "moonshotai/Kimi-K2.5"),
        ("any", "Qwen/Qwen3-8B:x", "Qwen/Qwen3-8B"),  # the server knows better
        ("any", "/models/a:b", "/models/a:b"),  # a folder, colon and all
    ],
)
def test_the_server_names_it_or_the_models_name_does(model, said, expected):
    assert tokenizer_id_of(model, said) == expected


def test_a_folder_is_enough_and_is_loaded_once(tiny_model):
    tokenizer = load("test/tiny", str(tiny_model))
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"
    assert load("test/tiny", str(tiny_model)) is tokenizer


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(tinkex.TinkerError, match=r"has no tokenizer\.json"):
        load("m", str(tmp_path))


def test_a_private_tokenizer_names_its_package():
    with pytest.raises(tinkex.TinkerError, match="tml_tokenizers"):
        load("thinkingmachines/secret")

"""The text and the bytes of tokens."""

from pathlib import Path

import pytest

from tinkex.models.text_stream import TextStream, TokenTexts
from tinkex.models.tiny_model import write_tiny_tokenizer
from tinkex.models.tokenizer import Tokenizer, load_tokenizer

TEXT = "naïve 猫 🏴‍☠️ \N{REPLACEMENT CHARACTER} end"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_pieces_of_any_size_give_the_same_text(tokenizer: Tokenizer, size: int) -> None:
    tokens = tokenizer.encode(f"{TEXT}<|im_end|>")
    stream = TextStream(tokenizer)
    parts = [stream.add(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    assert "".join(parts) + stream.end() == TEXT


def test_bytes_that_are_no_character_are_not_held_forever(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    lone = tokenizer.encode("猫")[1:2]
    shown = "".join(stream.add(lone) for _ in range(40))
    assert len(shown) >= 36


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(TEXT)
    assert b"".join(map(texts.bytes_of, tokens)) == TEXT.encode()
    (end,) = tokenizer.encode("<|im_end|>")
    assert texts.text_of(end) == "<|im_end|>"

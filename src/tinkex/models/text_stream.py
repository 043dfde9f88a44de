"""The text of tokens that arrive one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: A character has at most four bytes, and so at most four tokens.
MAX_TOKENS_PER_CHARACTER = 4


class TextStream:
    """
    The text of tokens that arrive one after another.

    A character may consist of several tokens, and some tokenizers print a token differently at the
    beginning of a text. So new tokens are decoded after those of the last text that was complete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._new: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is complete now; empty in the middle of a character."""
        self._new += tokens
        # Leave out the last tokens if they are the beginning of a character.
        for left in range(min(MAX_TOKENS_PER_CHARACTER, len(self._new))):
            count = len(self._new) - left
            text = self._text(count)
            if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                return self._take(count, text)
        if len(self._new) < MAX_TOKENS_PER_CHARACTER:
            return ""
        # These bytes are no character.
        return self._take(len(self._new), self._text(len(self._new)))

    def end(self) -> str:
        """What is left, complete or not."""
        return self._text(len(self._new))

    def _take(self, count: int, text: str) -> str:
        self._context, self._new = self._new[:count], self._new[count:]
        return text

    def _text(self, count: int) -> str:
        known = text_of(self._tokenizer, self._context)
        return text_of(self._tokenizer, self._context + self._new[:count])[len(known) :]


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special tokens such as the end of a turn."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

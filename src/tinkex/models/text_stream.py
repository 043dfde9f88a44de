"""The text of tokens: as they arrive one after another, and of single ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.models.tokenizer import Tokenizer

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
        # A few are enough: the text of one more token depends on no more.
        first = max(0, count - MAX_TOKENS_PER_CHARACTER)
        self._context, self._new = self._new[first:count], self._new[count:]
        return text

    def _text(self, count: int) -> str:
        known = text_of(self._tokenizer, self._context)
        return text_of(self._tokenizer, self._context + self._new[:count])[len(known) :]


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special tokens such as the end of a turn."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


class TokenTexts:
    """The bytes and the text of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._added = {
            token: added.content.encode()
            for token, added in self._backend.get_added_tokens_decoder().items()
        }
        decoder = self._backend.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def text_of(self, token: int) -> str:
        """Its text; a token that is a part of a character has replacement characters."""
        return self.bytes_of(token).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added
        spelled = self._backend.id_to_token(token) or ""
        if self._is_byte_level:
            return bytes(_BYTES[each] for each in spelled if each in _BYTES)
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes([int(spelled[3:5], 16)])  # a byte of a SentencePiece vocabulary
        return spelled.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if it is printable."""
    letters, further = {}, 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            letters[chr(byte)] = byte
        else:
            letters[chr(further)] = byte
            further += 1
    return letters


_BYTES = _byte_letters()

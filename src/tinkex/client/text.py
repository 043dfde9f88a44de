"""Text to tokens and back, for clients that know their model."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


class SpeaksText(ABC):
    """`encode` and `decode` with the tokenizer of the client's model, fetched once."""

    @abstractmethod
    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return self.get_tokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; the first call asks the server which tokenizer it is."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens, such as `SampledSequence.tokens`."""
        ids = [int(token) for token in token_ids]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

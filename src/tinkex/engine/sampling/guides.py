"""Guides: which tokens may come next in a sequence whose text must follow a grammar (llguidance)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tinkex.extras import MissingExtra, needs
from tinkex.wire.errors import UserFailure

if TYPE_CHECKING:
    import llguidance


class Guide:
    """
    The state of a grammar after the tokens of one sequence.

    A grammar may become too complex for the library's limits. Then `error` says so, all tokens are
    allowed, and the caller ends the request: other requests of the same step must go on.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def error(self) -> UserFailure | None:
        if not self._matcher.is_error():
            return None
        return UserFailure(
            f"the grammar of this request cannot be followed: {self._matcher.get_error()}"
        )

    def copy(self) -> Guide:
        """A guide for another sequence, with its own state."""
        return Guide(self._matcher.deep_copy(), self._vocab_size)

    def allowed_V(self) -> Tensor:
        """Whether each token may come next; only end tokens once the text is complete."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return torch.ones(self._vocab_size, dtype=torch.bool)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits).bool()

    def accept(self, token: int) -> None:
        """The sequence goes on with this token."""
        self._matcher.consume_token(token)


class Guides:
    """Makes guides for the tokenizer of one model, which is read with the first grammar."""

    def __init__(self, folder: Path, *, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_tokens = sorted(end_tokens)
        self._tokenizer: llguidance.LLTokenizer | None = None

    def start(self, grammar: str) -> Guide:
        """A guide at the beginning of a text. UserFailure for a grammar that cannot be used."""
        try:
            with needs("Guided sampling"):
                import llguidance
        except MissingExtra as missing:
            raise UserFailure(str(missing)) from missing
        if not self._end_tokens:
            raise UserFailure(
                "this model has no end token, so guided sampling cannot end: add eos_token_id to "
                "its generation_config.json."
            )
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(
                (self._folder / "tokenizer.json").read_text(encoding="utf-8"),
                n_vocab=self._vocab_size,
                eos_token=self._end_tokens,
            )
        # It would print its errors; they are part of the answer.
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        guide = Guide(matcher, self._vocab_size)
        if guide.error is not None:
            raise guide.error
        return guide

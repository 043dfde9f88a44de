"""What is being sampled: requests, their sequences, and when a sequence is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tinkex.engine.blocks import Holding

#: The key of an adapter among samplers; None is the base model.
AdapterKey = str | None

#: Decodes token ids to text, special tokens included.
Decode = Callable[[Sequence[int]], str]

#: A character may take four tokens of one byte; so many more are decoded than a stop text has.
SPLIT_CHARACTER = 4


@dataclass(frozen=True, kw_only=True)
class Stops:
    """When a sequence ends before its length is reached."""

    token_ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    decode: Decode | None = None

    @property
    def window(self) -> int:
        """How many tokens at the end can hold a stop text: every token adds a byte or more."""
        return max(len(text.encode()) for text in self.texts) + SPLIT_CHARACTER

    def met_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` completes a stop; earlier ones are known not to."""
        if tokens[-1] in self.token_ids:
            return True
        if not self.texts or self.decode is None:
            return False
        text = self.decode(tokens[-self.window :])
        return any(stop in text for stop in self.texts)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How the tokens of a request are drawn."""

    temperature: float
    #: None: all tokens.
    top_k: int | None
    #: None: no cut.
    top_p: float | None
    seed: int
    #: So many likeliest tokens are reported with every drawn one.
    report_top: int = 0


@dataclass(frozen=True, kw_only=True)
class PromptQuestions:
    """What is asked about the prompt beside its continuation."""

    logprobs: bool = False
    top: int = 0
    #: Only positions from here on are answered (the first token never is).
    first_position: int = 1

    def __bool__(self) -> bool:
        return self.logprobs or self.top > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    ticket: int
    adapter: AdapterKey
    prompt: list[int]
    samples: int
    max_new_tokens: int
    drawing: Drawing
    stops: Stops
    questions: PromptQuestions = field(default_factory=PromptQuestions)


@dataclass(kw_only=True, eq=False, slots=True)
class SampleSequence:
    """One sample of a request while it grows."""

    request: Request
    #: Which of the request's samples this is: part of what its noise is made from.
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: (token ids, logprobs) of the likeliest, if asked for.
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    holding: Holding = field(default_factory=Holding)
    #: Order of admission: the youngest makes room when pages run out.
    age: int = 0
    stop_reason: Literal["length", "stop"] | None = None

    @property
    def known(self) -> int:
        """Tokens known so far, prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    def append(self, token: int, logprob: float, top: tuple[list[int], list[float]] | None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        if self.request.stops.met_by(self.tokens):
            self.stop_reason = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.stop_reason = "length"

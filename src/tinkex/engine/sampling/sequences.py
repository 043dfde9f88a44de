"""What is being sampled: requests, their sequences, and when a sequence is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from tinkex.engine.sampling.kv_pages import PageTable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: The key of an adapter among samplers; None is the base model.
AdapterKey = str | None

#: Decodes token ids to text, special tokens included.
Decode = Callable[[Sequence[int]], str]

#: A character may take four tokens of one byte; so many more are decoded than a stop text has.
MAX_TOKENS_PER_CHARACTER = 4


@dataclass(frozen=True, kw_only=True)
class Stops:
    """When a sequence ends before its length is reached."""

    token_ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    decode: Decode | None = None

    @property
    def window(self) -> int:
        """How many tokens at the end can hold a stop text: every token adds a byte or more."""
        return max(len(text.encode()) for text in self.texts) + MAX_TOKENS_PER_CHARACTER

    def matched_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` completes a stop; earlier ones are known not to."""
        if tokens[-1] in self.token_ids:
            return True
        if not self.texts or self.decode is None:
            return False
        text = self.decode(tokens[-self.window :])
        return any(stop in text for stop in self.texts)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the tokens of a request are drawn."""

    temperature: float
    #: None: all tokens.
    top_k: int | None
    #: None: no cut.
    top_p: float | None
    seed: int
    #: So many top_tokens tokens are reported with every drawn one.
    top_logprobs: int = 0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can not be drawn."""
        return self.top_k is not None or self.top_p is not None


class PromptTargets(NamedTuple):
    """Tokens whose logprobs are asked for: `token[i]` as what follows prompt token `row[i]`."""

    #: In rising order.
    source: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PromptLogprobRequest:
    """What is asked about the prompt beside its continuation."""

    logprobs: bool = False
    top: int = 0
    #: Own logprobs and top_tokens tokens are answered from here on (the first token never is).
    first_position: int = 1
    targets: PromptTargets | None = None
    #: So many other tokens are drawn for every position after the first.
    alternatives: int = 0

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.top or self.targets is not None or self.alternatives)

    @property
    def first_source(self) -> int | None:
        """The first prompt token whose hidden state is needed for an answer."""
        rows = []
        if self.logprobs or self.top:
            rows.append(self.first_position - 1)
        if self.targets is not None and len(self.targets.source):
            rows.append(int(self.targets.source[0]))
        if self.alternatives:
            rows.append(0)
        return min(rows, default=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    ticket: int
    adapter: AdapterKey
    prompt: list[int]
    samples: int
    max_new_tokens: int
    sampling: SamplingConfig
    stops: Stops
    prompt_logprobs: PromptLogprobRequest = field(default_factory=PromptLogprobRequest)
    #: Who asked: owners share the sampler evenly.
    owner: str = ""
    #: Tokens are told as they are drawn.
    streams: bool = False


@dataclass(kw_only=True, eq=False, slots=True)
class SampleSequence:
    """One sample of a request while it grows."""

    request: Request
    #: Which of the request's samples this is: part of what its noise is made from.
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: (token ids, logprobs) of the top_tokens, if asked for.
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    page_table: PageTable = field(default_factory=PageTable)
    #: Order of admission: the youngest makes room when pages run out.
    admission_number: int = 0
    stop_reason: Literal["length", "stop"] | None = None
    #: So many of the tokens have been told.
    reported: int = 0

    @property
    def length(self) -> int:
        """Tokens known so far, prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def cached_tokens(self) -> list[int]:
        """The tokens whose keys and values are in the cache: all but the last one drawn."""
        return self.request.prompt + self.tokens[:-1]

    def append(self, token: int, logprob: float, top: tuple[list[int], list[float]] | None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        if self.request.stops.matched_by(self.tokens):
            self.stop_reason = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.stop_reason = "length"

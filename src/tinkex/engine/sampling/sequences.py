"""Sample requests, their sequences, and stop conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from tinkex.engine.sampling.kv_pages import PageTable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tinkex.engine.model.image_places import ImagePlaces
    from tinkex.engine.sampling.guides import Guide

#: The folder of a sampler adapter; None is the base model.
AdapterKey = str | None

#: Decodes token ids to text, special tokens included.
Decode = Callable[[Sequence[int]], str]

#: A character may be split into four one-byte tokens, so this many more tokens than the bytes of a
#: stop text are decoded.
MAX_TOKENS_PER_CHARACTER = 4


#: Biases of single tokens that a GPU adds by itself. With more, the host samples.
DEVICE_BIASES = 64


@dataclass(frozen=True, kw_only=True)
class Stops:
    """Conditions that end a sequence before its maximum length."""

    token_ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    decode: Decode | None = None

    @property
    def window(self) -> int:
        """Number of last tokens that can contain a stop text: every token has at least one byte."""
        return max(len(text.encode()) for text in self.texts) + MAX_TOKENS_PER_CHARACTER

    def matched_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop; earlier tokens were checked before."""
        if tokens[-1] in self.token_ids:
            return True
        if not self.texts or self.decode is None:
            return False
        text = self.decode(tokens[-self.window :])
        return any(stop in text for stop in self.texts)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the tokens of a request are sampled."""

    temperature: float
    #: None: all tokens.
    top_k: int | None
    #: None: no truncation.
    top_p: float | None
    seed: int
    #: Number of most likely tokens reported with every sampled token.
    top_logprobs: int = 0
    #: Tokens whose logits change, and what is added to each.
    bias_tokens: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    #: Subtracted from the logits of tokens that the sequence has: once, and for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Whether each sequence has a guide, which excludes some tokens.
    is_guided: bool = False

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before the temperature is applied."""
        return bool(self.bias_tokens or self.presence_penalty or self.frequency_penalty)

    @property
    def is_truncated(self) -> bool:
        """Whether top_k or top_p exclude some tokens."""
        return self.top_k is not None or self.top_p is not None

    @cached_property
    def needs_host(self) -> bool:
        """Whether a GPU cannot sample several tokens in a row without the host."""
        return bool(
            self.is_truncated
            or self.top_logprobs
            or len(self.bias_tokens) > DEVICE_BIASES
            or self.presence_penalty
            or self.frequency_penalty
            or self.is_guided
        )


class PromptTargets(NamedTuple):
    """Requested logprobs: of `token[i]` as the continuation of prompt token `source[i]`."""

    #: In ascending order.
    source: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PromptLogprobRequest:
    """Which logprobs of the prompt are requested. Empty if none."""

    logprobs: bool = False
    top: int = 0
    #: First position with logprobs and top tokens. Position 0 never has any.
    first_position: int = 1
    targets: PromptTargets | None = None
    #: Number of alternative tokens sampled for every position after the first.
    alternatives: int = 0

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.top or self.targets is not None or self.alternatives)

    @property
    def first_source(self) -> int | None:
        """Index of the first prompt token whose hidden state is needed; None if none is."""
        sources = []
        if self.logprobs or self.top:
            sources.append(self.first_position - 1)
        if self.targets is not None and len(self.targets.source):
            sources.append(int(self.targets.source[0]))
        if self.alternatives:
            sources.append(0)
        return min(sources, default=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    ticket: int
    adapter: AdapterKey
    #: With placeholders for images.
    prompt: list[int]
    images: ImagePlaces | None = None
    samples: int
    max_new_tokens: int
    sampling: SamplingConfig
    stops: Stops
    prompt_logprobs: PromptLogprobRequest = field(default_factory=PromptLogprobRequest)
    #: Owners get equal shares of the sampler.
    owner: str = ""
    #: Whether tokens are reported as they are sampled.
    streams: bool = False
    #: The grammar of each sequence, before its first token.
    guide: Guide | None = None

    @cached_property
    def prompt_keys(self) -> list[int]:
        """What the prefix cache knows the prompt by."""
        return self.prompt if self.images is None else self.images.keys(self.prompt)


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class SampleSequence:
    """One sample of a request."""

    request: Request
    #: Index among the samples of the request. Part of its noise seed.
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: (token ids, logprobs) of the most likely tokens, if requested.
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    page_table: PageTable = field(default_factory=PageTable)
    #: The slot of its state in models with recurrent layers.
    state: int | None = None
    #: Order of admission. The sequence admitted last is preempted first.
    admission_number: int = 0
    stop_reason: Literal["length", "stop"] | None = None
    #: Number of tokens already reported to a streaming client.
    reported: int = 0
    #: Which tokens may come next; None: any.
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if self.request.guide is not None:
            self.guide = self.request.guide.copy()

    @property
    def length(self) -> int:
        """Number of tokens so far, including the prompt."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.request.max_new_tokens - len(self.tokens)

    def tokens_ahead(self, steps: int) -> int:
        """How many tokens a decode step of `steps` samples for this sequence."""
        return 1 if self.request.sampling.needs_host else min(steps, self.tokens_left)

    @property
    def position(self) -> int:
        """The rotary position of the last token, which is behind all images."""
        images = self.request.images
        return self.length - 1 + (0 if images is None else images.delta)

    @property
    def cached_keys(self) -> list[int]:
        """The tokens whose keys and values are cached: all except the last sampled one."""
        return self.request.prompt_keys + self.tokens[:-1]

    def append(self, token: int, logprob: float, top: tuple[list[int], list[float]] | None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        if self.request.stops.matched_by(self.tokens):
            self.stop_reason = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.stop_reason = "length"
        elif self.guide is not None:
            self.guide.accept(token)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> int:
        """
        Appends tokens up to the one that ends the sequence. Returns how many were appended.

        The result is that of `append` for each, but cheap if none of them ends the sequence.
        """
        before, stops = len(self.tokens), self.request.stops
        if (
            before + len(tokens) < self.request.max_new_tokens
            and not stops.texts
            and self.guide is None
            and stops.token_ids.isdisjoint(tokens)
        ):
            self.tokens += tokens
            self.logprobs += logprobs
            return len(tokens)
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.append(token, logprob, None)
            if self.stop_reason is not None:
                break
        return len(self.tokens) - before

"""What an engine asks of its sampler. `sampler.BatchingSampler` is the one that it has."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tinkex.engine.adapters.memory_plan import Resident
from tinkex.engine.input_checks import NONE_PREPARED, PreparedImages
from tinkex.wire.sampling import SampleRequest, SampleResponse


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The outcome of a request, which has the ticket that it was submitted with."""

    ticket: int
    outcome: SampleResponse | Exception


@dataclass(frozen=True, kw_only=True)
class PartialOutput:
    """Tokens of a streamed sequence that were sampled since the last report."""

    ticket: int
    sequence: int
    #: Index of the first of them in the sequence.
    start: int
    tokens: list[int]
    logprobs: list[float]
    #: (token ids, logprobs) of the most likely tokens at each position, if requested.
    top: list[tuple[list[int], list[float]]]


@dataclass(frozen=True, kw_only=True)
class SamplerStats:
    """Current sizes and counts, under their names in the engine's report."""

    samples_waiting: int
    samples_running: int
    sequences_running: int
    kv_pages: int
    kv_pages_used: int
    #: Pages that only the prefix cache holds.
    kv_pages_known: int
    #: Tokens computed since the start.
    tokens_prefilled: int
    tokens_sampled: int


class Sampler(Protocol):
    """Called by one thread. No call waits for a disk."""

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    @property
    def awaited_read(self) -> Future[Any] | None:
        """The adapter read that all requests wait for; None if some request can proceed."""
        ...

    def submit(
        self,
        ticket: int,
        sample_request: SampleRequest,
        adapter: Path | None,
        *,
        owner: str = "",
        streams: bool = False,
        images: PreparedImages = NONE_PREPARED,
    ) -> None:
        """
        Checks and queues a request. If it raises `UserFailure`, nothing has changed.

        A request that waits holds no memory but its images; its adapter is read when it is next.
        """
        ...

    def cancel(self, ticket: int) -> None: ...

    def advance(self) -> list[Finished]:
        """Computes for a moment; ends early when a request finishes."""
        ...

    def partial_outputs(self) -> list[PartialOutput]:
        """Tokens of streamed requests since the last call."""
        ...

    def stats(self) -> SamplerStats: ...

    def adapter_residents(self) -> list[Resident]:
        """The adapters in memory. Their files never change, so they can be dropped and read again."""
        ...

    def drop_adapter(self, name: str) -> None: ...

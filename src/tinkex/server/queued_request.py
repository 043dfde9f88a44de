"""
One request of a client, from its acceptance to its outcome.

A `QueuedRequest` is made by a route, stored, queued and finished. For an engine it becomes an `Order`,
which the engine answers with a `Done` (`wire/proto/frames.proto`). Its `Outcome` is stored and
returned to the client.
"""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """The operation a request asks for; also the `kind` column of its row."""

    CREATE_MODEL = "create_model"  # step 0 of every model
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"  # not a step: runs outside the queue
    SAMPLE = "sample"  # not a step
    CREATE_CUSTOM_LOSS = "create_custom_loss"  # not a step


PASSES = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD})


class Cause(enum.StrEnum):
    """Why a step failed; also the `cause` column of its row."""

    WORK = "work"  # it ran and failed, or was refused for its content
    # An optim_step after a failed forward_backward. Rows of older servers have this value too, so it
    # keeps its original spelling.
    INCOMPLETE_GRADIENTS = "spoiled"
    GAP = "gap"  # an earlier number never arrived
    LATE = "late"  # it arrived after its gap was closed


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a request, or its error."""

    result: bytes = b""
    error: str | None = None
    #: Whose error it was: `user` or `server`.
    category: str | None = None
    cause: Cause = Cause.WORK
    #: Seconds that the engine computed.
    compute_s: float = 0.0
    #: The storage key of a large result.
    result_key: str | None = None
    #: The checkpoint version that a save made or a load read. Recovery loads it again.
    version_id: str | None = None
    #: Commits it in one transaction with other rows. Raises UserFailure if these are refused.
    commit: Callable[[], Awaitable[None]] | None = None
    #: Whether the next request of this kind would fail in the same way.
    permanent: bool = False


@dataclass(kw_only=True, slots=True)
class QueuedRequest:
    """A request and, except for its payload, the row that stores it."""

    #: Set just before it is stored. A refused step keeps it empty: it is stored when it fails.
    request_id: str = ""
    owner: str
    #: The key that it came with; 0 on a server without keys.
    key_id: int = 0
    kind: Kind
    base_model: str
    #: The request in its normalized encoding; None if only the store has it.
    payload: bytes | None = None
    session_id: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None
    #: The number of a step in its model, or of a sample in its sampler.
    seq_id: int | None = None
    #: How many sequences a sample asks for.
    sequences: int = 0
    #: The checkpoint version of a sample, or of a load that was resolved on acceptance.
    version_id: str | None = None
    #: Tokens in the examples of a pass, or in the prompt of a sample.
    tokens: int = 0
    #: The first tokens of a sample's prompt (`scheduler.replicas`); empty if unknown.
    prompt_start: bytes = b""
    #: The term under which a step runs (`store.ownership`); None on a server that is alone.
    term: int | None = None
    #: The worker that runs it; None on a server that is alone, empty for that of its model.
    home: str | None = None
    #: How often it was lost because its engine ended by itself.
    attempts: int = 0
    #: None while it waits, except for a refused step, which has its error from the start. An outcome
    #: that was read from the store has no result in it.
    outcome: Outcome | None = None

    @property
    def creates_model(self) -> bool:
        """A `load_weights` with number 0 creates its model from a checkpoint."""
        return self.seq_id == 0 and self.kind in (Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS)

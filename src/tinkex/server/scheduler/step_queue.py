"""
Orders the steps of one model. Pure logic: it uses no clock, tensors, sockets or SQL.

Steps arrive in any order and run strictly by sequence number, each once. A number that never arrives
is a gap: after a timeout, the steps that wait for it fail. A failed `forward_backward` leaves
incomplete gradients, so the next `optim_step` fails too.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tinkex.server.queued_request import PASSES, Cause, Kind, QueuedRequest

# Maximum passes of one model that the engine has at the same time: enough that it is never idle,
# and few enough that the batch of another model starts soon.
MAX_PASSES_PER_BATCH = 4
# Refused numbers kept per model. A client that sends in order has at most one.
MAX_REFUSED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """Consecutive steps that run together, or fail without running."""

    steps: tuple[QueuedRequest, ...]
    #: Why they must not run: they fail with this text, in the category `user`.
    refusal: str | None = None
    cause: Cause = Cause.WORK
    #: The engine must drop the gradients it holds for this model.
    clears_gradients: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A number that has not arrived although later ones have."""

    missing: int
    since_s: float


class Replay(enum.Enum):
    """What the rebuild of a model from its log does with a finished step."""

    SKIP = enum.auto()  # it changed nothing
    RUN = enum.auto()
    CLEAR_GRADIENTS = enum.auto()  # it failed and cleared the gradients


CHANGES_MODEL = frozenset(
    {Kind.CREATE_MODEL, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD_WEIGHTS}
)


def replay_of(step: QueuedRequest) -> Replay:
    """What a rebuild does with a finished step."""
    if step.outcome is None or step.outcome.error is None:
        return Replay.RUN if step.kind in CHANGES_MODEL else Replay.SKIP
    if step.outcome.cause is Cause.GAP:
        return Replay.CLEAR_GRADIENTS
    if step.kind is Kind.OPTIM_STEP and step.outcome.cause is not Cause.LATE:
        return Replay.CLEAR_GRADIENTS
    return Replay.SKIP


@dataclass(slots=True)
class StepQueue:
    """The steps of one model in the order of their numbers. Number 0 creates the model."""

    #: The number that runs next.
    next_seq: int = 0
    #: Steps that have arrived and not started, by number.
    waiting: dict[int, QueuedRequest] = field(default_factory=dict)
    #: Steps that have started and not finished.
    running: dict[int, QueuedRequest] = field(default_factory=dict)
    #: Steps that were refused on arrival, each with its outcome. The client may send the same
    #: number again, until a later number arrives.
    refused: dict[int, QueuedRequest] = field(default_factory=dict)
    #: Why the gradients are incomplete: a pass since the last optimizer step failed.
    gradient_error: str | None = None
    #: Why the model does not exist: its creation failed.
    creation_error: str | None = None
    _gap_since_s: float | None = None

    def add(self, step: QueuedRequest, *, now_s: float) -> bool:
        """Add a step; False when the queue has already passed its number."""
        number = number_of(step)
        if number < self.next_seq:
            return False
        self.waiting[number] = step
        self.refused.pop(number, None)
        self._update_gap(now_s)
        return True

    def refuse(self, step: QueuedRequest) -> None:
        """Record a malformed step with its outcome: later steps do not wait for its number."""
        number = number_of(step)
        known = number in self.waiting or number < self.next_seq
        if not known and len(self.refused) < MAX_REFUSED:
            self.refused[number] = step

    def next_batch(self, *, now_s: float, max_passes: int | None = None) -> StepBatch | None:
        """Start the next steps; None while some are running or the next has not arrived."""
        if self.running:
            return None
        if self.waiting and self.next_seq in self.refused:
            return self._next_refused(now_s)
        if self.next_seq not in self.waiting:
            self._update_gap(now_s)
            return None
        steps = tuple(self._first_steps(max_passes or MAX_PASSES_PER_BATCH))
        for step in steps:
            self.running[number_of(step)] = self.waiting.pop(number_of(step))
        self.next_seq = number_of(steps[-1]) + 1
        self._gap_since_s = None
        self._update_gap(now_s)
        if self.creation_error is not None:
            return StepBatch(steps=steps, refusal=self.creation_error)
        if steps[0].kind is Kind.OPTIM_STEP and self.gradient_error is not None:
            return StepBatch(
                steps=steps,
                refusal=self.gradient_error,
                cause=Cause.INCOMPLETE_GRADIENTS,
                clears_gradients=True,
            )
        return StepBatch(steps=steps)

    def finish(self, step: QueuedRequest, *, failure: str | None) -> None:
        """A running step succeeded, or failed with this reason."""
        self.running.pop(number_of(step), None)
        self.apply_result(step, failure)

    def apply_result(self, step: QueuedRequest, failure: str | None) -> None:
        """Record what a finished step means for later steps: incomplete gradients, no model."""
        if failure is not None and step.creates_model:
            self.creation_error = f"this model was not created: {failure}"
        elif step.kind is Kind.FORWARD_BACKWARD and failure is not None:
            self.gradient_error = self.gradient_error or incomplete_gradients(
                number_of(step), failure
            )
        elif step.kind is Kind.OPTIM_STEP or (step.kind is Kind.LOAD_WEIGHTS and failure is None):
            self.gradient_error = None

    def requeue(self, steps: Iterable[QueuedRequest]) -> None:
        """Put steps that were lost with their engine back at the front."""
        for step in steps:
            number = number_of(step)
            self.running.pop(number, None)
            # A step that was refused on arrival fails once more, later.
            (self.waiting if step.request_id else self.refused)[number] = step
            self.next_seq = min(self.next_seq, number)

    def rewind(self, next_seq: int) -> None:
        """Continue from an earlier number; the caller requeues the steps that ran since then."""
        self.next_seq = next_seq
        self._gap_since_s = None

    def is_blocked_by(self, seq_id: int) -> bool:
        """Whether later steps have arrived and wait for this number."""
        return any(number > seq_id for number in self.waiting)

    def gap(self) -> Gap | None:
        """The missing number that blocks the queue, once nothing else can run."""
        if self._gap_since_s is None or self.running or not self.waiting:
            return None
        return Gap(missing=self.next_seq, since_s=self._gap_since_s)

    def close_gap(self, *, now_s: float) -> StepBatch:
        """Stop waiting for the missing number: every step up to the next gap fails."""
        missing = self.next_seq
        first = min(self.waiting)
        self.next_seq = first
        steps = []
        while step := self.waiting.pop(self.next_seq, None):
            steps.append(step)
            self.running[number_of(step)] = step
            self.next_seq += 1
        self.refused = {n: why for n, why in self.refused.items() if n >= self.next_seq}
        self._gap_since_s = None
        self._update_gap(now_s)
        numbers = str(missing) if first == missing + 1 else f"{missing} to {first - 1}"
        refusal = (
            f"step {numbers} of this model never arrived, so the steps behind it were not run. "
            f"Submit the work again; the next step of this model is {self.next_seq}."
        )
        # The missing step may have been a pass: the client expects gradients that do not exist.
        return StepBatch(
            steps=tuple(steps), refusal=refusal, cause=Cause.GAP, clears_gradients=True
        )

    def _next_refused(self, now_s: float) -> StepBatch:
        """Fail a refused number, because a later number has arrived."""
        step = self.refused.pop(self.next_seq)
        self.running[self.next_seq] = step
        self.next_seq += 1
        self._gap_since_s = None
        self._update_gap(now_s)
        return StepBatch(
            steps=(step,),
            refusal=step.outcome.error if step.outcome else "",
            # A failed optimizer step always clears the gradients.
            clears_gradients=step.kind is Kind.OPTIM_STEP,
        )

    def _first_steps(self, max_passes: int) -> Iterable[QueuedRequest]:
        """The next step, and if it is a pass, the passes that follow it without a gap."""
        first = self.waiting[self.next_seq]
        yield first
        if first.kind not in PASSES:
            return
        for seq_id in range(self.next_seq + 1, self.next_seq + max_passes):
            step = self.waiting.get(seq_id)
            if step is None or step.kind not in PASSES:
                return
            yield step

    def _update_gap(self, now_s: float) -> None:
        """Start the gap clock when steps wait for a missing number; stop it when it arrives."""
        if not self.waiting or self.next_seq in self.waiting:
            self._gap_since_s = None
        elif self._gap_since_s is None:
            self._gap_since_s = now_s


def restore_queue(
    finished: Sequence[QueuedRequest],
    *,
    next_seq: int = 0,
    gradient_error: str | None = None,
) -> StepQueue:
    """The queue of a model after its finished steps, in order; after a snapshot if given."""
    queue = StepQueue(next_seq=next_seq, gradient_error=gradient_error)
    for step in finished:
        queue.apply_result(step, step.outcome.error if step.outcome else None)
        queue.next_seq = max(queue.next_seq, number_of(step) + 1)
    return queue


def number_of(step: QueuedRequest) -> int:
    """The number of a step in its model."""
    return step.seq_id or 0


def incomplete_gradients(seq_id: int, failure: str) -> str:
    """The error of an optimizer step after a failed pass."""
    return (
        f"forward_backward step {seq_id} before this optim_step failed ({failure}), so its "
        "gradients are incomplete. No step was taken and the gradients were cleared; submit the "
        "batch again, then optim_step."
    )


def model_deleted() -> str:
    """The error of a step whose model was idle for so long that its state was deleted."""
    return (
        "this model is no longer stored: its session ended or was idle for too long. Its "
        "checkpoints are kept: create a new model from one with "
        "create_training_client_from_state."
    )


def arrived_late(seq_id: int) -> str:
    """The error of a step that arrived after its gap was closed."""
    return (
        f"step {seq_id} arrived after the server had stopped waiting for it and failed the steps "
        "behind it, so it was not run. Submit the work again with a new number."
    )

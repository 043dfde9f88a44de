"""Which step of a model runs next, and what becomes of it. No clock, no tensors, no sockets, no SQL."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# Passes of one model that are with the engine together: enough that it never waits for the
# next chunk, few enough that another model's turn comes soon.
MAX_PASSES_PER_BATCH = 4
# Refused numbers that are remembered for a model; a client in order has one.
MAX_REFUSED = 1000


class Kind(enum.StrEnum):
    """What a request asks for; also the `kind` column of its row."""

    CREATE_MODEL = "create_model"  # step 0 of every model
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"  # outside the order of steps
    SAMPLE = "sample"  # outside the order of steps
    CREATE_CUSTOM_LOSS = "create_custom_loss"  # outside the order of steps


class Cause(enum.StrEnum):
    """Why a step failed; also the `cause` column of its row."""

    WORK = "work"  # it was tried, or refused for what it asks
    SPOILED = "spoiled"  # an optim_step after a failed forward_backward
    GAP = "gap"  # a number before it never came
    LATE = "late"  # it came after its gap had been closed


PASSES = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD})


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One numbered request of one model."""

    seq_id: int
    request_id: str
    kind: Kind
    #: A `load_weights` that makes its model: step 0 of the newer way to start from a checkpoint.
    creates: bool = False
    #: Of the examples of a pass.
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """StepRunner whose turn has come; they run together, or are refused without running."""

    steps: tuple[Step, ...]
    #: Why they must not run: they fail as the user's with this text.
    refusal: str | None = None
    cause: Cause = Cause.WORK
    #: The engine must drop the gradients it holds for this model.
    clears_gradients: bool = False
    #: The step was refused when it came, so nothing of it is stored yet.
    unfiled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A number that has not come, while later ones wait behind it."""

    missing: int
    since_s: float


class Replayed(enum.Enum):
    """What a finished step needs when its model is built again from its log."""

    NOTHING = enum.auto()  # it changed nothing
    RUN = enum.auto()  # run it again
    CLEAR_GRADIENTS = enum.auto()  # it failed, and took the gradients with it


CHANGES = frozenset({Kind.CREATE_MODEL, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD_WEIGHTS})


def replayed(kind: Kind, failed: Cause | None) -> Replayed:
    """How a finished step takes part in building its model again."""
    if failed is None:
        return Replayed.RUN if kind in CHANGES else Replayed.NOTHING
    if failed is Cause.GAP:
        return Replayed.CLEAR_GRADIENTS
    if kind is Kind.OPTIM_STEP and failed is not Cause.LATE:
        return Replayed.CLEAR_GRADIENTS
    return Replayed.NOTHING


@dataclass(slots=True)
class StepQueue:
    """
    The steps of one model, in the order of their numbers.

    StepRunner arrive in any order and leave strictly by number, each once. The creation is number 0.
    """

    #: The number whose turn is next.
    next_seq: int = 0
    #: StepRunner that wait, by number.
    held: dict[int, Step] = field(default_factory=dict)
    #: StepRunner that were handed out and are not finished.
    running: dict[int, Step] = field(default_factory=dict)
    #: Numbers whose requests were refused when they came, and why. Their senders may try again
    #: with the same number, until a later one shows that they went on.
    refused: dict[int, tuple[Kind, str]] = field(default_factory=dict)
    #: Why gradients are incomplete: a pass since the last optimizer step failed.
    spoiled: str | None = None
    #: Why there is no model: its creation failed.
    creation_error: str | None = None
    _gap_since_s: float | None = None

    def arrive(self, step: Step, *, now_s: float) -> bool:
        """Take a new step in; False when its turn has already gone by."""
        if step.seq_id < self.next_seq:
            return False
        self.held[step.seq_id] = step
        self.refused.pop(step.seq_id, None)
        self._mark_gap(now_s)
        return True

    def refuse(self, seq_id: int, kind: Kind, reason: str) -> None:
        """A step was malformed: if later ones come, they need not wait for its number."""
        taken = seq_id in self.held or seq_id < self.next_seq
        if not taken and len(self.refused) < MAX_REFUSED:
            self.refused[seq_id] = (kind, reason)

    def take(self, *, now_s: float, most: int | None = None) -> StepBatch | None:
        """The steps that run now, or None while one is running or the next has not come."""
        if self.running:
            return None
        if self.held and self.next_seq in self.refused:
            return self._take_refused(now_s)
        if self.next_seq not in self.held:
            self._mark_gap(now_s)
            return None
        steps = tuple(self._head(most or MAX_PASSES_PER_BATCH))
        for step in steps:
            self.running[step.seq_id] = self.held.pop(step.seq_id)
        self.next_seq = steps[-1].seq_id + 1
        self._gap_since_s = None
        self._mark_gap(now_s)
        first = steps[0]
        if self.creation_error is not None:
            return StepBatch(steps=steps, refusal=self.creation_error)
        if first.kind is Kind.OPTIM_STEP and self.spoiled is not None:
            return StepBatch(
                steps=steps, refusal=self.spoiled, cause=Cause.SPOILED, clears_gradients=True
            )
        return StepBatch(steps=steps)

    def finish(self, step: Step, *, failure: str | None) -> None:
        """A handed-out step is done, or failed with this reason."""
        self.running.pop(step.seq_id, None)
        self.learn(step, failure)

    def requeue(self, steps: Iterable[Step]) -> None:
        """StepRunner that were handed out and lost with the engine wait again, in front."""
        for step in steps:
            self.running.pop(step.seq_id, None)
            self.held[step.seq_id] = step
            self.next_seq = min(self.next_seq, step.seq_id)

    def rewind(self, next_seq: int) -> None:
        """Go on with an earlier number; steps that ran since then are put back one by one."""
        self.next_seq = next_seq
        self._gap_since_s = None

    def requeue_refused(self, step: Step, reason: str) -> None:
        """The same for a number whose request was refused: it counts as failed once more, later."""
        self.running.pop(step.seq_id, None)
        self.next_seq = min(self.next_seq, step.seq_id)
        self.refused[step.seq_id] = (step.kind, reason)

    def awaits(self, seq_id: int) -> bool:
        """Whether steps behind this number are here already, and wait for it."""
        return any(number > seq_id for number in self.held)

    def gap(self) -> Gap | None:
        """The missing number that others wait for, once nothing else can run."""
        if self._gap_since_s is None or self.running or not self.held:
            return None
        return Gap(missing=self.next_seq, since_s=self._gap_since_s)

    def close_gap(self, *, now_s: float) -> StepBatch:
        """Give the missing number up: every step held up to the next gap fails, naming it."""
        missing = self.next_seq
        first = min(self.held)
        self.next_seq = first
        steps = []
        while step := self.held.pop(self.next_seq, None):
            steps.append(step)
            self.running[step.seq_id] = step
            self.next_seq += 1
        self.refused = {n: why for n, why in self.refused.items() if n >= self.next_seq}
        self._gap_since_s = None
        self._mark_gap(now_s)
        numbers = str(missing) if first == missing + 1 else f"{missing} to {first - 1}"
        refusal = (
            f"step {numbers} of this model never arrived, so the steps behind it were not run. "
            f"Submit the work again; the next step of this model is {self.next_seq}."
        )
        # Whatever the missing step was, the gradients are not what its client thinks.
        return StepBatch(
            steps=tuple(steps), refusal=refusal, cause=Cause.GAP, clears_gradients=True
        )

    def _take_refused(self, now_s: float) -> StepBatch:
        """A number whose request was refused, and whose sender went on: it has failed."""
        kind, reason = self.refused.pop(self.next_seq)
        step = Step(seq_id=self.next_seq, request_id="", kind=kind)
        self.running[step.seq_id] = step
        self.next_seq += 1
        self._gap_since_s = None
        self._mark_gap(now_s)
        return StepBatch(
            steps=(step,),
            refusal=reason,
            # As after any optimizer step that failed.
            clears_gradients=kind is Kind.OPTIM_STEP,
            unfiled=True,
        )

    def _head(self, most: int) -> Iterable[Step]:
        """The next step, and with it the passes that follow a pass without a gap."""
        first = self.held[self.next_seq]
        yield first
        if first.kind not in PASSES:
            return
        for seq_id in range(self.next_seq + 1, self.next_seq + most):
            step = self.held.get(seq_id)
            if step is None or step.kind not in PASSES:
                return
            yield step

    def learn(self, step: Step, failure: str | None) -> None:
        """What a finished step means for those behind it."""
        if failure is not None and (step.kind is Kind.CREATE_MODEL or step.creates):
            self.creation_error = f"this model was not created: {failure}"
        elif step.kind is Kind.FORWARD_BACKWARD and failure is not None:
            self.spoiled = self.spoiled or spoiled_by(step.seq_id, failure)
        elif step.kind is Kind.OPTIM_STEP or (step.kind is Kind.LOAD_WEIGHTS and failure is None):
            self.spoiled = None

    def _mark_gap(self, now_s: float) -> None:
        """Start the clock when steps wait for a number that is not here; stop it when it is."""
        if not self.held or self.next_seq in self.held:
            self._gap_since_s = None
        elif self._gap_since_s is None:
            self._gap_since_s = now_s


def spoiled_by(seq_id: int, failure: str) -> str:
    """What an optimizer step answers after a pass before it failed."""
    return (
        f"forward_backward step {seq_id} before this optim_step failed ({failure}), so its "
        "gradients are incomplete. No step was taken and the gradients were cleared; submit the "
        "batch again, then optim_step."
    )


def restored(
    finished: Sequence[tuple[Step, str | None]], *, next_seq: int = 0, spoiled: str | None = None
) -> StepQueue:
    """The line of a model as its finished steps, in order, left it; from a snapshot if given."""
    line = StepQueue(next_seq=next_seq, spoiled=spoiled)
    for step, failure in finished:
        line.learn(step, failure)
        line.next_seq = max(line.next_seq, step.seq_id + 1)
    return line


def forgotten() -> str:
    """What a step answers whose model was silent for so long that its state was deleted."""
    return (
        "this model is not kept any more: its session ended or was silent for too long. Its "
        "checkpoints are: make a new model from one with create_training_client_from_state."
    )


def late(seq_id: int) -> str:
    """What a step answers that comes after its gap was closed."""
    return (
        f"step {seq_id} arrived after the steps behind it had been given up waiting for it, so it "
        "was not run. Submit the work again with a new number."
    )

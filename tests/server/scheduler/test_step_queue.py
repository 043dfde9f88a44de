"""`StepQueue`: order, gaps and incomplete gradients. No clock, no sockets, no tensors."""

import pytest

from tinkex.server.queued_request import Cause, Kind, Outcome, QueuedRequest
from tinkex.server.scheduler.step_queue import (
    Replay,
    StepQueue,
    arrived_late,
    replay_of,
    restore_queue,
)

FB, OPT = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP
FWD, SAVE, LOAD = Kind.FORWARD, Kind.SAVE_WEIGHTS, Kind.LOAD_WEIGHTS


def step(seq_id: int, kind: Kind = FB, outcome: Outcome | None = None) -> QueuedRequest:
    return QueuedRequest(
        request_id=f"r{seq_id}",
        owner="o",
        kind=kind,
        base_model="b",
        seq_id=seq_id,
        outcome=outcome,
    )


def new_queue(next_seq: int = 1) -> StepQueue:
    """A queue whose model exists."""
    return StepQueue(next_seq=next_seq)


def numbers(queue: StepQueue) -> list[int | None] | None:
    batch = queue.next_batch(now_s=0.0)
    return None if batch is None else [step.seq_id for step in batch.steps]


@pytest.mark.parametrize(
    ("arrivals", "batches"),
    [
        ([1, 2, 3], [[1, 2, 3]]),  # passes in a row run together
        ([2, 3, 1], [[1, 2, 3]]),  # the last to arrive is the first to run
        ([3, 2], []),  # nothing runs before 1
        ([1, 3], [[1]]),  # 3 waits for 2
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4], [5, 6]]),  # four together at most
    ],
)
def test_passes_run_strictly_by_number(arrivals: list[int], batches: list[list[int]]) -> None:
    queue = new_queue()
    for seq_id in arrivals:
        assert queue.add(step(seq_id), now_s=0.0)
    seen = []
    while batch := queue.next_batch(now_s=0.0):
        seen.append([taken.seq_id for taken in batch.steps])
        for taken in batch.steps:
            queue.finish(taken, failure=None)
    assert seen == batches


@pytest.mark.parametrize(
    ("kinds", "batches"),
    [
        ([FB, FB, OPT, FB], [2, 1, 1]),  # a step sees exactly the passes before it
        ([FWD, FB, SAVE, OPT], [2, 1, 1]),  # forwards are passes too
        ([LOAD, FB], [1, 1]),
    ],
)
def test_a_batch_ends_where_the_kind_changes(kinds: list[Kind], batches: list[int]) -> None:
    queue = new_queue()
    for seq_id, kind in enumerate(kinds, 1):
        queue.add(step(seq_id, kind), now_s=0.0)
    seen = []
    while batch := queue.next_batch(now_s=0.0):
        seen.append(len(batch.steps))
        for taken in batch.steps:
            queue.finish(taken, failure=None)
    assert seen == batches


def test_no_batch_starts_while_one_is_running() -> None:
    queue = new_queue()
    queue.add(step(1, OPT), now_s=0.0)
    queue.add(step(2, OPT), now_s=0.0)
    assert numbers(queue) == [1]
    assert numbers(queue) is None
    queue.finish(step(1, OPT), failure=None)
    assert numbers(queue) == [2]


def test_lost_steps_are_requeued_at_the_front() -> None:
    queue = new_queue()
    for seq_id in (1, 2, 3):
        queue.add(step(seq_id), now_s=0.0)
    assert numbers(queue) == [1, 2, 3]
    queue.finish(step(1), failure=None)
    queue.requeue([step(2), step(3)])
    assert numbers(queue) == [2, 3]


def test_a_failed_pass_makes_the_next_step_fail_and_clears_the_gradients() -> None:
    queue = new_queue()
    for seq_id, kind in enumerate([FB, FB, OPT, FB, OPT], 1):
        queue.add(step(seq_id, kind), now_s=0.0)
    queue.next_batch(now_s=0.0)
    queue.finish(step(1), failure="datum 0 is empty")
    queue.finish(step(2), failure=None)
    batch = queue.next_batch(now_s=0.0)
    assert batch is not None
    assert batch.clears_gradients
    assert batch.refusal is not None
    assert "step 1" in batch.refusal
    assert "datum 0 is empty" in batch.refusal
    queue.finish(step(3, OPT), failure=batch.refusal)
    assert numbers(queue) == [4]
    queue.finish(step(4), failure=None)
    batch = queue.next_batch(now_s=0.0)
    assert batch is not None
    assert batch.refusal is None


@pytest.mark.parametrize(
    ("kind", "failure", "incomplete"),
    [
        (FB, "bad", True),
        (FB, None, False),
        (FWD, "bad", False),  # a forward adds nothing
        (SAVE, "bad", False),
    ],
)
def test_only_a_failed_backward_pass_makes_gradients_incomplete(
    kind: Kind, failure: str | None, incomplete: bool
) -> None:
    queue = new_queue()
    queue.add(step(1, kind), now_s=0.0)
    queue.next_batch(now_s=0.0)
    queue.finish(step(1, kind), failure=failure)
    assert (queue.gradient_error is not None) == incomplete


def test_loading_weights_clears_the_gradient_error() -> None:
    queue = new_queue()
    for seq_id, kind in enumerate([FB, LOAD], 1):
        queue.add(step(seq_id, kind), now_s=0.0)
    queue.next_batch(now_s=0.0)
    queue.finish(step(1), failure="bad")
    queue.next_batch(now_s=0.0)
    queue.finish(step(2, LOAD), failure=None)
    assert queue.gradient_error is None


def test_a_model_that_was_not_created_refuses_every_step() -> None:
    queue = StepQueue()
    queue.add(step(0, Kind.CREATE_MODEL), now_s=0.0)
    queue.add(step(1), now_s=0.0)
    queue.next_batch(now_s=0.0)
    queue.finish(step(0, Kind.CREATE_MODEL), failure="rank 0")
    batch = queue.next_batch(now_s=0.0)
    assert batch is not None
    assert batch.refusal == "this model was not created: rank 0"


def test_a_gap_starts_with_the_first_step_behind_it() -> None:
    queue = new_queue()
    assert queue.gap() is None
    queue.add(step(3), now_s=10.0)
    queue.add(step(2), now_s=20.0)
    gap = queue.gap()
    assert gap is not None
    assert (gap.missing, gap.since_s) == (1, 10.0)
    queue.add(step(1), now_s=30.0)
    assert queue.gap() is None


def test_closing_a_gap_fails_the_waiting_steps_and_the_model_continues() -> None:
    queue = new_queue()
    for seq_id in (3, 4, 7):
        queue.add(step(seq_id, OPT if seq_id == 4 else FB), now_s=0.0)
    batch = queue.close_gap(now_s=360.0)
    assert [failed.seq_id for failed in batch.steps] == [3, 4]
    assert batch.clears_gradients
    assert batch.refusal is not None
    assert "step 1 to 2 of this model never arrived" in batch.refusal
    assert "the next step of this model is 5" in batch.refusal
    for failed in batch.steps:
        queue.finish(failed, failure=batch.refusal)
    gap = queue.gap()
    assert gap is not None
    assert (gap.missing, gap.since_s) == (5, 360.0)
    assert not queue.add(step(2), now_s=361.0)
    assert "step 2 arrived after" in arrived_late(2)


@pytest.mark.parametrize(
    ("kind", "failed", "action"),
    [
        (Kind.CREATE_MODEL, None, Replay.RUN),
        (FB, None, Replay.RUN),
        (FB, Cause.WORK, Replay.SKIP),  # checked before anything changed
        (OPT, None, Replay.RUN),
        (OPT, Cause.WORK, Replay.CLEAR_GRADIENTS),  # it cleared the gradients
        (OPT, Cause.INCOMPLETE_GRADIENTS, Replay.CLEAR_GRADIENTS),
        (OPT, Cause.LATE, Replay.SKIP),  # the queue had passed it
        (FWD, Cause.GAP, Replay.CLEAR_GRADIENTS),  # closing a gap clears the gradients
        (LOAD, None, Replay.RUN),
        (LOAD, Cause.WORK, Replay.SKIP),
        (FWD, None, Replay.SKIP),
        (SAVE, None, Replay.SKIP),
        (Kind.SAVE_FOR_SAMPLER, None, Replay.SKIP),
    ],
)
def test_what_a_rebuild_does_with_each_finished_step(
    kind: Kind, failed: Cause | None, action: Replay
) -> None:
    outcome = Outcome() if failed is None else Outcome(error="bad", cause=failed)
    assert replay_of(step(1, kind, outcome)) is action


def test_a_queue_is_restored_from_finished_steps() -> None:
    done = Outcome()
    finished = [step(0, Kind.CREATE_MODEL, done), step(1, FB, done)]
    queue = restore_queue([*finished, step(2, FB, Outcome(error="bad"))])
    assert queue.next_seq == 3
    assert queue.gradient_error is not None
    assert "step 2" in queue.gradient_error

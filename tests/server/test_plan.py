"""Order, once, gaps and spoiled gradients: decided without a clock, a socket or a tensor."""

import pytest

from tinkex.server.scheduler.step_queue import (
    Cause,
    Kind,
    Line,
    Replayed,
    Step,
    late,
    replayed,
    restored,
)

FB, OPT = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP
FWD, SAVE, LOAD = Kind.FORWARD, Kind.SAVE_WEIGHTS, Kind.LOAD_WEIGHTS


def step(seq_id: int, kind: Kind = FB) -> Step:
    return Step(seq_id=seq_id, request_id=f"r{seq_id}", kind=kind)


def line(next_seq: int = 1) -> Line:
    """A line whose model exists."""
    return Line(next_seq=next_seq)


def numbers(line: Line) -> list[int] | None:
    turn = line.take(now_s=0.0)
    return None if turn is None else [step.seq_id for step in turn.steps]


@pytest.mark.parametrize(
    ("arrivals", "turns"),
    [
        ([1, 2, 3], [[1, 2, 3]]),  # passes in a row run together
        ([2, 3, 1], [[1, 2, 3]]),  # the last to come is the first to run
        ([3, 2], []),  # nothing runs before 1
        ([1, 3], [[1]]),  # 3 waits for 2
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4], [5, 6]]),  # four together at most
    ],
)
def test_passes_leave_strictly_by_number(arrivals: list[int], turns: list[list[int]]) -> None:
    waiting = line()
    for seq_id in arrivals:
        assert waiting.arrive(step(seq_id), now_s=0.0)
    seen = []
    while turn := waiting.take(now_s=0.0):
        seen.append([taken.seq_id for taken in turn.steps])
        for taken in turn.steps:
            waiting.finish(taken, failure=None)
    assert seen == turns


@pytest.mark.parametrize(
    ("kinds", "turns"),
    [
        ([FB, FB, OPT, FB], [2, 1, 1]),  # a step sees exactly the passes before it
        ([FWD, FB, SAVE, OPT], [2, 1, 1]),  # forwards are passes too
        ([LOAD, FB], [1, 1]),
    ],
)
def test_a_turn_ends_where_the_kind_changes(kinds: list[Kind], turns: list[int]) -> None:
    waiting = line()
    for seq_id, kind in enumerate(kinds, 1):
        waiting.arrive(step(seq_id, kind), now_s=0.0)
    seen = []
    while turn := waiting.take(now_s=0.0):
        seen.append(len(turn.steps))
        for taken in turn.steps:
            waiting.finish(taken, failure=None)
    assert seen == turns


def test_nothing_is_handed_out_while_something_runs() -> None:
    waiting = line()
    waiting.arrive(step(1, OPT), now_s=0.0)
    waiting.arrive(step(2, OPT), now_s=0.0)
    assert numbers(waiting) == [1]
    assert numbers(waiting) is None
    waiting.finish(step(1, OPT), failure=None)
    assert numbers(waiting) == [2]


def test_lost_steps_are_handed_out_again_in_front() -> None:
    waiting = line()
    for seq_id in (1, 2, 3):
        waiting.arrive(step(seq_id), now_s=0.0)
    assert numbers(waiting) == [1, 2, 3]
    waiting.finish(step(1), failure=None)
    waiting.put_back([step(2), step(3)])
    assert numbers(waiting) == [2, 3]


def test_a_failed_pass_makes_the_next_step_fail_and_clears_the_gradients() -> None:
    waiting = line()
    for seq_id, kind in enumerate([FB, FB, OPT, FB, OPT], 1):
        waiting.arrive(step(seq_id, kind), now_s=0.0)
    waiting.take(now_s=0.0)
    waiting.finish(step(1), failure="datum 0 is empty")
    waiting.finish(step(2), failure=None)
    turn = waiting.take(now_s=0.0)
    assert turn is not None
    assert turn.clears_gradients
    assert turn.refusal is not None
    assert "step 1" in turn.refusal
    assert "datum 0 is empty" in turn.refusal
    waiting.finish(step(3, OPT), failure=turn.refusal)
    assert numbers(waiting) == [4]
    waiting.finish(step(4), failure=None)
    turn = waiting.take(now_s=0.0)
    assert turn is not None
    assert turn.refusal is None


@pytest.mark.parametrize(
    ("kind", "failure", "spoiled"),
    [
        (FB, "bad", True),
        (FB, None, False),
        (FWD, "bad", False),  # a forward adds nothing
        (SAVE, "bad", False),
    ],
)
def test_only_a_failed_backward_spoils(kind: Kind, failure: str | None, spoiled: bool) -> None:
    waiting = line()
    waiting.arrive(step(1, kind), now_s=0.0)
    waiting.take(now_s=0.0)
    waiting.finish(step(1, kind), failure=failure)
    assert (waiting.spoiled is not None) == spoiled


def test_loading_weights_forgets_a_failed_pass() -> None:
    waiting = line()
    for seq_id, kind in enumerate([FB, LOAD], 1):
        waiting.arrive(step(seq_id, kind), now_s=0.0)
    waiting.take(now_s=0.0)
    waiting.finish(step(1), failure="bad")
    waiting.take(now_s=0.0)
    waiting.finish(step(2, LOAD), failure=None)
    assert waiting.spoiled is None


def test_a_model_that_was_not_created_refuses_every_step() -> None:
    waiting = Line()
    waiting.arrive(step(0, Kind.CREATE_MODEL), now_s=0.0)
    waiting.arrive(step(1), now_s=0.0)
    waiting.take(now_s=0.0)
    waiting.finish(step(0, Kind.CREATE_MODEL), failure="rank 0")
    turn = waiting.take(now_s=0.0)
    assert turn is not None
    assert turn.refusal == "this model was not created: rank 0"


def test_the_clock_of_a_gap_starts_with_the_first_step_behind_it() -> None:
    waiting = line()
    assert waiting.gap() is None
    waiting.arrive(step(3), now_s=10.0)
    waiting.arrive(step(2), now_s=20.0)
    gap = waiting.gap()
    assert gap is not None
    assert (gap.missing, gap.since_s) == (1, 10.0)
    waiting.arrive(step(1), now_s=30.0)
    assert waiting.gap() is None


def test_a_closed_gap_fails_what_waited_and_the_model_goes_on() -> None:
    waiting = line()
    for seq_id in (3, 4, 7):
        waiting.arrive(step(seq_id, OPT if seq_id == 4 else FB), now_s=0.0)
    turn = waiting.close_gap(now_s=360.0)
    assert [failed.seq_id for failed in turn.steps] == [3, 4]
    assert turn.clears_gradients
    assert turn.refusal is not None
    assert "step 1 to 2 of this model never arrived" in turn.refusal
    assert "the next step of this model is 5" in turn.refusal
    for failed in turn.steps:
        waiting.finish(failed, failure=turn.refusal)
    gap = waiting.gap()
    assert gap is not None
    assert (gap.missing, gap.since_s) == (5, 360.0)
    assert not waiting.arrive(step(2), now_s=361.0)
    assert "step 2 arrived after" in late(2)


@pytest.mark.parametrize(
    ("kind", "failed", "needed"),
    [
        (Kind.CREATE_MODEL, None, Replayed.RUN),
        (FB, None, Replayed.RUN),
        (FB, Cause.WORK, Replayed.NOTHING),  # checked before anything changed
        (OPT, None, Replayed.RUN),
        (OPT, Cause.WORK, Replayed.CLEAR_GRADIENTS),  # it took the gradients with it
        (OPT, Cause.SPOILED, Replayed.CLEAR_GRADIENTS),
        (OPT, Cause.LATE, Replayed.NOTHING),  # the line had gone on
        (FWD, Cause.GAP, Replayed.CLEAR_GRADIENTS),  # closing a gap clears, whatever waited
        (LOAD, None, Replayed.RUN),
        (LOAD, Cause.WORK, Replayed.NOTHING),
        (FWD, None, Replayed.NOTHING),
        (SAVE, None, Replayed.NOTHING),
        (Kind.SAVE_FOR_SAMPLER, None, Replayed.NOTHING),
    ],
)
def test_what_a_log_needs_to_be_run_again(
    kind: Kind, failed: Cause | None, needed: Replayed
) -> None:
    assert replayed(kind, failed) is needed


def test_a_line_is_restored_from_its_finished_steps() -> None:
    finished: list[tuple[Step, str | None]] = [
        (step(0, Kind.CREATE_MODEL), None),
        (step(1), None),
        (step(2), "bad"),
    ]
    waiting = restored(finished)
    assert waiting.next_seq == 3
    assert waiting.spoiled is not None
    assert "step 2" in waiting.spoiled

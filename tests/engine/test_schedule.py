"""Who runs when, with numbers in place of tensors."""

import random

import pytest

from tinkex.engine.blocks import Pages
from tinkex.engine.schedule import (
    DecodeStep,
    FillStep,
    RunLevel,
    Schedule,
    SharedRun,
    groups,
    run_levels,
    table_is_cheaper,
)
from tinkex.engine.sequences import Drawing, PromptQuestions, Request, SampleSequence, Stops

DRAWING = Drawing(temperature=1.0, top_k=None, top_p=None, seed=0)


def request(
    ticket: int, prompt: int, new: int, *, samples: int = 1, adapter: str | None = None
) -> Request:
    return Request(
        ticket=ticket,
        adapter=adapter,
        prompt=list(range(prompt)),
        samples=samples,
        max_new_tokens=new,
        drawing=DRAWING,
        stops=Stops(),
        questions=PromptQuestions(logprobs=True),
    )


def schedule(pages: int, *, sequences: int = 64, tokens: int = 1000) -> Schedule:
    return Schedule(Pages(pages, 4), max_sequences=sequences, max_batch_tokens=tokens)


def next_token(sequence: SampleSequence) -> int:
    """Depends on the sequence's past alone, as real noise does."""
    past = [sequence.request.ticket, sequence.index, *sequence.tokens]
    return hash(tuple(past)) % 1000


class Machine:
    """Runs steps the way the sampler does; keeps what is in each cache row."""

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        self.rows: dict[int, tuple[int, int, int]] = {}
        self.done: list[SampleSequence] = []
        self.steps: list[FillStep | DecodeStep] = []

    def run(self, limit: int = 10_000) -> None:
        while self.step():
            assert len(self.steps) < limit, "no progress"

    def step(self) -> bool:
        step = self.plan.next_step()
        if step is None:
            return False
        self.steps.append(step)
        if isinstance(step, FillStep):
            self._fill(step)
        else:
            self._decode(step)
        self.done += self.plan.drop_finished()
        return True

    def _fill(self, step: FillStep) -> None:
        for piece in step.pieces:
            fill = piece.fill
            for position in range(piece.start, piece.stop):
                row = self.plan.pages.row(fill.holding, position)
                self.rows[row] = (fill.request.ticket, position, fill.tokens[position])
        for piece in step.pieces:
            born, copies = self.plan.filled(piece)
            for source, target, length in copies:
                for offset in range(length):
                    self.rows[target + offset] = self.rows[source + offset]
            for sequence in born:
                sequence.append(next_token(sequence), 0.0, None)

    def _decode(self, step: DecodeStep) -> None:
        for sequence in step.sequences:
            position = sequence.known - 1
            row = self.plan.pages.row(sequence.holding, position)
            self.rows[row] = (sequence.request.ticket, position, sequence.tokens[-1])
        levels = run_levels(self.plan.pages, step.sequences)
        read: dict[int, list[int]] = {}
        for level in levels:
            assert level.rows == [s for run in level.runs for s in range(run.first, run.last)]
            for run in level.runs:
                for at in range(run.first, run.last):
                    read.setdefault(at, []).extend(range(run.start, run.stop))
        for at, sequence in enumerate(step.sequences):
            known = [*sequence.request.prompt, *sequence.tokens]
            ticket = sequence.request.ticket
            assert [self.rows[row] for row in read[at]] == [
                (ticket, position, token) for position, token in enumerate(known)
            ]
        for sequence in step.sequences:
            sequence.append(next_token(sequence), 0.0, None)


def tokens_alone(request: Request, index: int) -> list[int]:
    sequence = SampleSequence(request=request, index=index)
    while sequence.stop_reason is None:
        sequence.append(next_token(sequence), 0.0, None)
    return sequence.tokens


def test_a_prompt_is_filled_once_for_all_its_samples() -> None:
    plan = schedule(64)
    plan.add(request(1, 10, 5, samples=6))
    machine = Machine(plan)
    machine.run()
    fills = [step for step in machine.steps if isinstance(step, FillStep)]
    assert [(p.start, p.stop) for p in fills[0].pieces] == [(0, 10)]
    assert len(fills) == 1
    assert len(machine.done) == 6


def test_samples_of_a_prompt_read_its_full_pages_together() -> None:
    plan = schedule(64)
    plan.add(request(1, 10, 5, samples=3))
    machine = Machine(plan)
    machine.step()
    step = plan.next_step()
    assert isinstance(step, DecodeStep)
    first, second = run_levels(plan.pages, step.sequences)
    assert [(run.first, run.last, run.stop - run.start) for run in first.runs] == [(0, 3, 8)]
    assert [(run.first, run.last, run.stop - run.start) for run in second.runs] == [
        (0, 1, 3),  # two tokens of the prompt and the first drawn
        (1, 2, 3),
        (2, 3, 3),
    ]


def test_long_prompts_are_filled_in_pieces() -> None:
    plan = schedule(64, tokens=8)
    plan.add(request(1, 20, 2))
    plan.add(request(2, 3, 2))
    machine = Machine(plan)
    machine.run()
    fills = [step for step in machine.steps if isinstance(step, FillStep)]
    assert [[(p.start, p.stop) for p in step.pieces] for step in fills] == [
        [(0, 8)],
        [(8, 16)],
        [(16, 20), (0, 3)],
    ]


def test_arrivals_do_not_stop_those_who_run() -> None:
    plan = schedule(64)
    plan.add(request(0, 4, 50))
    machine = Machine(plan)
    machine.step()
    for ticket in range(1, 6):
        plan.add(request(ticket, 4, 50))
        machine.step()
        machine.step()
    kinds = [type(step).__name__ for step in machine.steps]
    assert kinds == ["FillStep"] + ["DecodeStep", "FillStep"] * 5


def test_neighbours_share_an_adapter() -> None:
    plan = schedule(64)
    for ticket, adapter in enumerate(["b", None, "a", "b", None]):
        plan.add(request(ticket, 4, 5, adapter=adapter))
    machine = Machine(plan)
    machine.step()
    step = plan.next_step()
    assert isinstance(step, DecodeStep)
    assert groups(step.sequences) == [(0, 2, None), (2, 3, "a"), (3, 5, "b")]
    assert plan.adapters_in_use() == {"a", "b", None}


def test_the_youngest_makes_room_and_goes_on_later() -> None:
    plan = schedule(6)
    plan.add(request(1, 8, 12))
    plan.add(request(2, 8, 12))
    machine = Machine(plan)
    machine.run()
    assert [sequence.request.ticket for sequence in machine.done] == [1, 2]
    refills = [
        piece
        for step in machine.steps
        if isinstance(step, FillStep)
        for piece in step.pieces
        if len(piece.fill.tokens) > 8
    ]
    assert refills, "the second was never set aside"
    assert all(piece.fill.request.ticket == 2 for piece in refills)
    assert not any(piece.fill.questions for piece in refills)
    assert plan.pages.available == 6


def test_what_could_never_run_does_not_fit() -> None:
    plan = schedule(4)
    assert plan.fits(16)
    assert not plan.fits(17)


def test_more_samples_than_places_run_in_turns() -> None:
    plan = schedule(64, sequences=3)
    plan.add(request(1, 6, 4, samples=8))
    machine = Machine(plan)
    machine.run()
    assert sorted(sequence.index for sequence in machine.done) == list(range(8))
    assert max(len(s.sequences) for s in machine.steps if isinstance(s, DecodeStep)) == 3


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    plan = schedule(16, tokens=4)
    for ticket in range(3):
        plan.add(request(ticket, 6, 20, samples=2))
    machine = Machine(plan)
    for _ in range(6):
        machine.step()
    for ticket in range(3):
        plan.cancel(ticket)
    assert not plan.busy
    assert plan.pages.available == 16
    plan.cancel(99)


def test_requests_can_be_made_to_run_one_by_one() -> None:
    plan = Schedule(
        Pages(64, 4), max_sequences=64, max_batch_tokens=100, one_request_at_a_time=True
    )
    for ticket in range(3):
        plan.add(request(ticket, 5, 4, samples=2))
    machine = Machine(plan)
    machine.run()
    assert [s.request.ticket for s in machine.done] == [0, 0, 1, 1, 2, 2]
    for step in machine.steps:
        if isinstance(step, DecodeStep):
            assert len({s.request.ticket for s in step.sequences}) == 1


def one_run_each(lengths: list[int]) -> list[RunLevel]:
    runs = [SharedRun(0, length, at, at + 1) for at, length in enumerate(lengths)]
    return [RunLevel(runs, list(range(len(lengths))))]


@pytest.mark.parametrize(
    ("lengths", "cheaper"),
    [
        ([100] * 32, True),  # one call in place of 32
        ([100], False),
        ([30] * 4, False),  # the rectangle itself costs eight calls
        ([20] * 31 + [380], False),  # mostly filling
        ([1000] * 32, False),  # too long to copy
    ],
)
def test_a_rectangle_serves_many_short_sequences(lengths: list[int], cheaper: bool) -> None:
    assert table_is_cheaper(one_run_each(lengths), lengths) is cheaper


@pytest.mark.parametrize("seed", range(25))
def test_whatever_arrives_everybody_ends_with_their_own_tokens(seed: int) -> None:
    """Random requests and cancellations in a cache that is far too small."""
    rng = random.Random(seed)
    pages = rng.randint(5, 30)
    plan = schedule(pages, sequences=rng.randint(1, 8), tokens=rng.choice([3, 10, 100]))
    machine = Machine(plan)
    asked: dict[int, Request] = {}
    for ticket in range(20):
        prompt = rng.randint(1, pages * 2)
        new = rng.randint(1, pages * 4 - prompt)
        one = request(
            ticket, prompt, new, samples=rng.randint(1, 5), adapter=rng.choice([None, "a", "b"])
        )
        asked[ticket] = one
        plan.add(one)
        for _ in range(rng.randint(0, 12)):
            machine.step()
        if rng.random() < 0.1:
            plan.cancel(ticket)
            del asked[ticket]
    machine.run()
    done = {(s.request.ticket, s.index): s.tokens for s in machine.done}
    for ticket, one in asked.items():
        for index in range(one.samples):
            assert done[ticket, index] == tokens_alone(one, index)
    assert plan.pages.available == pages

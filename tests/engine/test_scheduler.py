"""The scheduler, with numbers instead of tensors."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from tinkex.engine.model.attention import ReadRound, SlotRange
from tinkex.engine.sampling.cache_reads import gather_is_cheaper, plan_range_reads, rectangles
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.scheduler import (
    DecodeStep,
    PrefillChunk,
    PrefillStep,
    Scheduler,
    adapter_ranges,
    steps_per_look,
)
from tinkex.engine.sampling.sequences import (
    PromptLogprobRequest,
    Request,
    SampleSequence,
    SamplingConfig,
    Stops,
)
from tinkex.engine.sampling.state_slots import StateSlots

SAMPLING = SamplingConfig(temperature=1.0, top_k=None, top_p=None, seed=0)


def request(
    ticket: int,
    prompt: int | list[int],
    new: int,
    *,
    samples: int = 1,
    adapter: str | None = None,
    owner: str = "",
    prompt_logprobs: PromptLogprobRequest | None = None,
) -> Request:
    return Request(
        ticket=ticket,
        adapter=adapter,
        prompt=list(range(prompt)) if isinstance(prompt, int) else prompt,
        samples=samples,
        max_new_tokens=new,
        sampling=SAMPLING,
        stops=Stops(),
        prompt_logprobs=PromptLogprobRequest(logprobs=True)
        if prompt_logprobs is None
        else prompt_logprobs,
        owner=owner,
    )


def schedule(
    pages: int,
    *,
    sequences: int = 64,
    tokens: int = 1000,
    between: int | None = None,
    max_idle: int = 0,
    states: int | None = None,
    load_adapter: Callable[[Request], bool] = lambda _: True,
) -> Scheduler:
    slots = None if states is None else StateSlots(states)
    return Scheduler(
        Pages(pages, 4, max_idle=max_idle, states=slots),
        max_sequences=sequences,
        max_batch_tokens=tokens,
        prefill_tokens=between,
        load_adapter=load_adapter,
    )


def next_token(sequence: SampleSequence) -> int:
    """Depends only on the sequence's past, as real noise does."""
    past = [sequence.request.ticket, sequence.index, *sequence.tokens]
    return hash(tuple(past)) % 1000


class Machine:
    """Runs steps as the sampler does, and tracks the content of each cache slot and state."""

    def __init__(self, plan: Scheduler, *, ahead: int = 1) -> None:
        self.plan, self.ahead = plan, ahead
        #: The adapter and all tokens up to the slot's own: what its keys and values depend on.
        self.slots: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        #: The adapter and all tokens that a state of recurrent layers stands for.
        self.states: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.done: list[SampleSequence] = []
        self.steps: list[PrefillStep | DecodeStep] = []

    def run(self, limit: int = 10_000) -> None:
        while self.step():
            assert len(self.steps) < limit, "no progress"

    def chunks(self) -> list[PrefillChunk]:
        return [p for step in self.steps if isinstance(step, PrefillStep) for p in step.chunks]

    def step(self) -> bool:
        step = self.plan.next_step(decode_steps=self.ahead)
        if step is None:
            return False
        self.steps.append(step)
        for copy in self.plan.take_state_copies():
            self.states[copy.target] = self.states[copy.source]
        if isinstance(step, PrefillStep):
            self._prefill(step)
        else:
            self._decode(step)
        self.done += self.plan.drop_finished()
        return True

    def _prefill(self, step: PrefillStep) -> None:
        for chunk in step.chunks:
            prefill = chunk.prefill
            if self.plan.pages.states is not None:
                self._compute_state(
                    prefill.states[0], prefill.request, prefill.tokens, chunk.start, chunk.stop
                )
            for position in range(chunk.start, chunk.stop):
                slot = self.plan.pages.slot(prefill.page_table, position)
                self.slots[slot] = (prefill.request.adapter, tuple(prefill.tokens[: position + 1]))
            for position in range(chunk.start):
                slot = self.plan.pages.slot(prefill.page_table, position)
                assert self.slots[slot] == (
                    prefill.request.adapter,
                    tuple(prefill.tokens[: position + 1]),
                )
        for chunk in step.chunks:
            started, copies = self.plan.finish_chunk(chunk)
            for source, target, length in copies:
                for offset in range(length):
                    self.slots[target + offset] = self.slots[source + offset]
            for sequence in started:
                sequence.append(next_token(sequence), 0.0, None)

    def _compute_state(
        self, state: int, request: Request, tokens: list[int], start: int, stop: int
    ) -> None:
        """A new sequence ignores what its slot has; others continue from exactly their tokens."""
        if start:
            assert self.states[state] == (request.adapter, tuple(tokens[:start]))
        self.states[state] = (request.adapter, tuple(tokens[:stop]))

    def _decode(self, step: DecodeStep) -> None:
        for _ in range(step.steps):
            if unfinished := [s for s in step.sequences if s.stop_reason is None]:
                self._decode_once(unfinished)

    def _decode_once(self, sequences: list[SampleSequence]) -> None:
        for sequence in sequences:
            position = sequence.length - 1
            slot = self.plan.pages.slot(sequence.page_table, position)
            known = (*sequence.request.prompt, *sequence.tokens)
            self.slots[slot] = (sequence.request.adapter, known)
            if self.plan.pages.states is not None:
                assert sequence.state is not None
                tokens = [*known]
                self._compute_state(
                    sequence.state, sequence.request, tokens, len(tokens) - 1, len(tokens)
                )
        levels = plan_range_reads(self.plan.pages, sequences)
        read: dict[int, list[int]] = {}
        for level in levels:
            reading = [s for run in level.ranges for s in range(run.first, run.last)]
            if level.sequences is None:
                assert reading == list(range(len(sequences)))
            else:
                assert reading == level.sequences.tolist()
            for run in level.ranges:
                for at in range(run.first, run.last):
                    read.setdefault(at, []).extend(range(run.start, run.stop))
        for at, sequence in enumerate(sequences):
            known = (*sequence.request.prompt, *sequence.tokens)
            assert [self.slots[slot] for slot in read[at]] == [
                (sequence.request.adapter, known[:end]) for end in range(1, len(known) + 1)
            ]
        for sequence in sequences:
            sequence.append(next_token(sequence), 0.0, None)


def tokens_alone(request: Request, index: int) -> list[int]:
    sequence = SampleSequence(request=request, index=index)
    while sequence.stop_reason is None:
        sequence.append(next_token(sequence), 0.0, None)
    return sequence.tokens


def test_a_prompt_is_prefilled_once_for_all_its_samples() -> None:
    plan = schedule(64)
    plan.add(request(1, 10, 5, samples=6))
    machine = Machine(plan)
    machine.run()
    prefills = [step for step in machine.steps if isinstance(step, PrefillStep)]
    assert [(p.start, p.stop) for p in prefills[0].chunks] == [(0, 10)]
    assert len(prefills) == 1
    assert len(machine.done) == 6


def test_samples_of_a_prompt_read_its_full_pages_together() -> None:
    plan = schedule(64)
    plan.add(request(1, 10, 5, samples=3))
    machine = Machine(plan)
    machine.step()
    step = plan.next_step()
    assert isinstance(step, DecodeStep)
    first, second = plan_range_reads(plan.pages, step.sequences)
    assert [(run.first, run.last, run.stop - run.start) for run in first.ranges] == [(0, 3, 8)]
    assert [(run.first, run.last, run.stop - run.start) for run in second.ranges] == [
        (0, 1, 3),  # two tokens of the prompt and the first sampled one
        (1, 2, 3),
        (2, 3, 3),
    ]


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([5, 5, 5], [(0, 3)]),
        ([5, 6, 5, 5], [(0, 3), (3, 4)]),  # three rows of six
        ([30, 1, 1], [(0, 1), (1, 3)]),  # one that is too long runs alone
        ([1, 1, 30], [(0, 2), (2, 3)]),
        ([19], [(0, 1)]),
    ],
)
def test_gathered_keys_of_a_step_are_limited(
    lengths: list[int], found: list[tuple[int, int]]
) -> None:
    assert list(rectangles(lengths, 18)) == found


def test_a_decode_step_has_pages_for_all_its_tokens() -> None:
    plan = schedule(64)
    plan.add(request(1, 10, 30))
    plan.add(request(2, 10, 3))
    machine = Machine(plan)
    machine.step()
    step = plan.next_step(decode_steps=8)
    assert isinstance(step, DecodeStep)
    assert step.steps == 8
    long, short = step.sequences
    assert long.page_table.page_count == plan.pages.needed(long.length + 7)
    # Two tokens are left, and the last sampled token is never written.
    assert short.page_table.page_count == plan.pages.needed(12)


def test_a_decode_step_has_one_token_if_pages_are_short() -> None:
    plan = schedule(8)
    plan.add(request(1, 12, 20))
    plan.add(request(2, 12, 20))
    machine = Machine(plan)
    machine.step()
    step = plan.next_step(decode_steps=8)
    assert isinstance(step, DecodeStep)
    assert step.steps == 1
    assert len(step.sequences) == 2


def test_a_decode_step_between_prefills_is_short() -> None:
    plan = schedule(64, tokens=8)
    plan.add(request(1, 8, 20))
    plan.add(request(2, 20, 20))
    machine = Machine(plan, ahead=8)
    for _ in range(12):
        machine.step()
    kinds = [s.steps if isinstance(s, DecodeStep) else "prefill" for s in machine.steps]
    last = max(at for at, kind in enumerate(kinds) if kind == "prefill")
    assert set(kinds[:last]) == {"prefill", 1}
    assert kinds[last + 1] == 8


def test_sequences_that_need_the_host_get_one_token() -> None:
    plan = schedule(64)
    truncated = dataclasses.replace(SAMPLING, top_k=5)
    plan.add(dataclasses.replace(request(1, 10, 30), sampling=truncated))
    machine = Machine(plan)
    machine.step()
    step = plan.next_step(decode_steps=8)
    assert step is not None
    assert plan.pages.count - plan.pages.available == plan.pages.needed(11)


@pytest.mark.parametrize(
    ("free", "by_host", "steps"),
    [(5, 0, 8), (0, 3, 1), (63, 1, 8), (4, 1, 4), (1, 1, 1), (9, 2, 4)],
)
def test_looks_become_as_frequent_as_sequences_that_need_them(
    free: int, by_host: int, steps: int
) -> None:
    truncated = dataclasses.replace(SAMPLING, top_k=5)
    requests = [request(1, 10, 30)] * free
    requests += [dataclasses.replace(request(1, 10, 30), sampling=truncated)] * by_host
    sequences = [SampleSequence(request=each, index=0) for each in requests]
    assert steps_per_look(sequences, 8) == steps
    assert [each.tokens_ahead(steps) for each in sequences] == [steps] * free + [1] * by_host


def test_long_prompts_are_prefilled_in_chunks() -> None:
    plan = schedule(64, tokens=8)
    plan.add(request(1, 20, 2))
    plan.add(request(2, 3, 2))
    machine = Machine(plan)
    machine.run()
    prefills = [step for step in machine.steps if isinstance(step, PrefillStep)]
    assert [[(p.start, p.stop) for p in step.chunks] for step in prefills] == [
        [(0, 8)],
        [(8, 16)],
        [(16, 20), (0, 3)],
    ]


def test_new_requests_do_not_block_running_sequences() -> None:
    plan = schedule(64)
    plan.add(request(0, 4, 50))
    machine = Machine(plan)
    machine.step()
    for ticket in range(1, 6):
        plan.add(request(ticket, 4, 50))
        machine.step()
        machine.step()
    kinds = [type(step).__name__ for step in machine.steps]
    assert kinds == ["PrefillStep"] + ["DecodeStep", "PrefillStep"] * 5


def test_sequences_of_one_adapter_are_adjacent() -> None:
    plan = schedule(64)
    for ticket, adapter in enumerate(["b", None, "a", "b", None]):
        plan.add(request(ticket, 4, 5, adapter=adapter))
    machine = Machine(plan)
    machine.step()
    step = plan.next_step()
    assert isinstance(step, DecodeStep)
    assert adapter_ranges(step.sequences) == [(0, 2, None), (2, 3, "a"), (3, 5, "b")]
    assert plan.adapters_in_use() == {"a", "b", None}


def test_a_request_waiting_for_an_adapter_blocks_no_request_with_a_loaded_adapter() -> None:
    there: set[str | None] = {None, "a"}
    plan = schedule(64, load_adapter=lambda request: request.adapter in there)
    for ticket, adapter in enumerate(["a", "b", "a", "b", None]):
        plan.add(request(ticket, 4, 2, adapter=adapter))
    machine = Machine(plan)
    machine.step()
    assert plan.adapters_in_use() == {"a", None}
    assert plan.adapters_awaited() == {"b"}
    machine.run()
    assert plan.next_step() is None
    assert sorted(sequence.request.ticket for sequence in machine.done) == [0, 2, 4]
    there.add("b")
    machine.run()
    assert not plan.busy


def test_each_missing_adapter_is_requested_once_per_step_and_excluded_ones_never() -> None:
    asked: list[str | None] = []

    def load(request: Request) -> bool:
        asked.append(request.adapter)
        return False

    plan = Scheduler(
        Pages(64, 4),
        max_sequences=64,
        max_batch_tokens=100,
        load_adapter=load,
        may_load=lambda adapter: adapter != "c",
    )
    for ticket, adapter in enumerate(["a", "c", "b", "a", "c", "b"]):
        plan.add(request(ticket, 4, 2, adapter=adapter))
    assert plan.next_step() is None
    assert asked == ["a", "b"]


def test_the_last_admitted_sequence_is_preempted_and_resumed() -> None:
    plan = schedule(6)
    plan.add(request(1, 8, 12))
    plan.add(request(2, 8, 12))
    machine = Machine(plan)
    machine.run()
    assert [sequence.request.ticket for sequence in machine.done] == [1, 2]
    resumed = [
        chunk
        for step in machine.steps
        if isinstance(step, PrefillStep)
        for chunk in step.chunks
        if len(chunk.prefill.tokens) > 8
    ]
    assert resumed, "the second sequence was never preempted"
    assert all(chunk.prefill.request.ticket == 2 for chunk in resumed)
    assert not any(chunk.prefill.prompt_logprobs for chunk in resumed)
    assert plan.pages.available == 6


def test_a_sequence_larger_than_the_cache_does_not_fit() -> None:
    plan = schedule(4)
    assert plan.pages.fits(16)
    assert not plan.pages.fits(17)


def test_more_samples_than_max_sequences_run_one_after_another() -> None:
    plan = schedule(64, sequences=3)
    plan.add(request(1, 6, 4, samples=8))
    machine = Machine(plan)
    machine.run()
    assert sorted(sequence.index for sequence in machine.done) == list(range(8))
    assert max(len(s.sequences) for s in machine.steps if isinstance(s, DecodeStep)) == 3


def test_a_canceled_request_releases_everything() -> None:
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
    plan = Scheduler(
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


def one_range_each(lengths: list[int]) -> list[ReadRound]:
    ranges = [SlotRange(0, length, at, at + 1) for at, length in enumerate(lengths)]
    return [ReadRound(ranges, None)]


@pytest.mark.parametrize(
    ("lengths", "cheaper"),
    [
        ([100] * 32, True),  # one call instead of 32
        ([100], False),
        ([30] * 4, False),  # a gathered table costs as much as eight calls
        ([20] * 31 + [380], False),  # mostly padding
        ([1000] * 32, False),  # too long to copy
    ],
)
def test_gathering_is_cheaper_for_many_short_sequences(lengths: list[int], cheaper: bool) -> None:
    assert gather_is_cheaper(one_range_each(lengths), lengths) is cheaper


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
def test_random_requests_all_end_with_their_own_tokens(
    seed: int, prefix_cache: bool, recurrent: bool
) -> None:
    """Random requests, prefixes, owners and cancellations in a cache that is far too small."""
    rng = random.Random(seed)
    pages = rng.randint(5, 30)
    states = rng.randint(1, 12) if recurrent else None
    plan = schedule(
        pages,
        sequences=rng.randint(1, 8),
        tokens=rng.choice([3, 10, 100]),
        between=rng.choice([None, 2]),
        max_idle=rng.randint(1, pages) if prefix_cache else 0,
        states=states,
    )
    machine = Machine(plan, ahead=8 if seed % 2 else 1)
    asked: dict[int, Request] = {}
    for ticket in range(20):
        prompt = rng.randint(1, pages * 2)
        new = rng.randint(1, pages * 4 - prompt)
        questions = PromptLogprobRequest(
            logprobs=rng.random() < 0.5, first_position=rng.randint(1, 9)
        )
        one = request(
            ticket,
            [rng.choice([0, 0, 0, 1])] * 3 + [7] * (prompt - 3) if prompt > 3 else prompt,
            new,
            samples=rng.randint(1, 5),
            adapter=rng.choice([None, "a"]),
            owner=rng.choice(["x", "x", "y", "z"]),
            prompt_logprobs=questions,
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
    if (slots := plan.pages.states) is not None:
        # All that is not kept is free again, each slot once.
        assert sorted(slots.take() for _ in range(slots.count)) == list(range(slots.count))
    answered = {p.prefill.request.ticket for p in machine.chunks() if p.prefill.prompt_logprobs}
    assert answered >= {ticket for ticket, one in asked.items() if one.prompt_logprobs}
    for chunk in machine.chunks():
        first_source = chunk.prefill.prompt_logprobs.first_source
        assert first_source is None or chunk.prefill.cached_tokens <= first_source


# -- prefix cache ---------------------------------------------------------------------------------

SILENT = PromptLogprobRequest()


def test_requests_with_the_same_prefix_compute_it_once() -> None:
    plan = schedule(64, max_idle=64)
    for ticket in range(4):
        plan.add(request(ticket, [*range(10), ticket], 3, prompt_logprobs=SILENT))
    machine = Machine(plan)
    machine.run()
    # The first is computed alone; the others wait for it and share its two full pages.
    assert [(p.prefill.request.ticket, p.start, p.stop) for p in machine.chunks()] == [
        (0, 0, 11),
        (1, 8, 11),
        (2, 8, 11),
        (3, 8, 11),
    ]
    assert [p.prefill.cached_tokens for p in machine.chunks()] == [0, 8, 8, 8]


def test_a_request_waits_only_for_a_prefix_that_it_can_use() -> None:
    plan = schedule(64, max_idle=64)
    plan.add(request(0, 10, 3, prompt_logprobs=SILENT))
    plan.add(request(1, 10, 3, prompt_logprobs=SILENT, adapter="a"))
    plan.add(request(2, 10, 3, prompt_logprobs=PromptLogprobRequest(logprobs=True)))
    machine = Machine(plan)
    machine.step()
    assert sorted(p.prefill.request.ticket for p in machine.chunks()) == [0, 1, 2]


def test_sequences_with_the_same_prefix_read_it_together() -> None:
    plan = schedule(200, max_idle=200)
    long = list(range(400))
    for ticket in range(3):
        plan.add(request(ticket, [*long, ticket], 9, prompt_logprobs=SILENT))
    plan.add(request(3, [5] * 9, 9, prompt_logprobs=SILENT))
    machine = Machine(plan)
    while plan.running < 4:
        machine.step()
    sequences = next(s for s in [plan.next_step()] if isinstance(s, DecodeStep)).sequences
    levels = plan_range_reads(plan.pages, sequences)
    shared = [run for run in levels[0].ranges if run.last - run.first == 3]
    assert [run.stop - run.start for run in shared] == [400]


def test_a_preempted_sequence_reuses_its_cached_pages() -> None:
    plan = schedule(7, max_idle=7)
    plan.add(request(1, [1] * 8, 12, prompt_logprobs=SILENT))
    plan.add(request(2, [2] * 8, 12, prompt_logprobs=SILENT))
    machine = Machine(plan)
    machine.run()
    again = [p for p in machine.chunks() if len(p.prefill.tokens) > 8]
    assert again
    assert min(p.start for p in again) > 0


# -- states of recurrent layers -------------------------------------------------------------------


def test_a_state_is_kept_at_the_last_page_border_of_a_prompt() -> None:
    plan = schedule(64, max_idle=64, states=8)
    first = list(range(11))
    plan.add(request(0, first, 3, prompt_logprobs=SILENT))
    machine = Machine(plan)
    machine.run()
    plan.add(request(1, [*first, 50, 51], 3, prompt_logprobs=SILENT, samples=2))
    machine.run()
    assert [(p.prefill.request.ticket, p.start, p.stop) for p in machine.chunks()] == [
        *((0, 0, 8), (0, 8, 11)),
        *((1, 8, 12), (1, 12, 13)),
    ]


def test_a_state_is_kept_where_prompts_part() -> None:
    """The second finds cached pages without a state and keeps one, so the third continues there."""
    plan = schedule(64, max_idle=64, states=8)
    machine = Machine(plan)
    for ticket in range(3):
        plan.add(request(ticket, [*range(8), *[90 + ticket] * 9], 1, prompt_logprobs=SILENT))
        machine.run()
    assert [(p.prefill.request.ticket, p.start, p.stop) for p in machine.chunks()] == [
        *((0, 0, 16), (0, 16, 17)),
        *((1, 0, 8), (1, 8, 16), (1, 16, 17)),
        *((2, 8, 16), (2, 16, 17)),
    ]


def test_sequences_take_the_slots_of_kept_states() -> None:
    plan = schedule(64, max_idle=64, states=2)
    machine = Machine(plan)
    plan.add(request(0, 9, 3, prompt_logprobs=SILENT))
    machine.run()
    assert plan.pages.states is not None
    assert plan.pages.states.kept == 1
    plan.add(request(1, [7] * 9, 3, prompt_logprobs=SILENT, samples=4))
    machine.run()
    plan.add(request(2, 9, 3, prompt_logprobs=SILENT))
    machine.run()
    last = machine.chunks()[-2]
    assert (last.prefill.request.ticket, last.start) == (2, 0)


# -- owners ---------------------------------------------------------------------------------------


def test_owners_alternate_however_many_requests_they_send() -> None:
    plan = schedule(400, sequences=4)
    for ticket in range(30):
        plan.add(request(ticket, 8, 6, owner="busy"))
    machine = Machine(plan)
    for _ in range(3):
        machine.step()
    for ticket in (100, 101):
        plan.add(request(ticket, 8, 6, owner="rare"))
    machine.run()
    order = [sequence.request.ticket for sequence in machine.done]
    # At most the requests that were already running finish first.
    assert max(order.index(ticket) for ticket in (100, 101)) <= 5


def test_an_owner_with_all_sequences_is_preempted_for_another() -> None:
    plan = schedule(400, sequences=4)
    for ticket in range(4):
        plan.add(request(ticket, 8, 500, owner="long"))
    machine = Machine(plan)
    for _ in range(20):
        machine.step()
    plan.add(request(100, 8, 5, owner="short"))
    for _ in range(12):
        machine.step()
    assert [sequence.request.ticket for sequence in machine.done] == [100]
    machine.run()
    assert sorted(sequence.request.ticket for sequence in machine.done) == [0, 1, 2, 3, 100]


def test_an_owner_with_all_pages_is_preempted_for_another() -> None:
    plan = schedule(40, sequences=64)
    for ticket in range(2):
        plan.add(request(ticket, 70, 10, owner="large"))
    machine = Machine(plan)
    for _ in range(5):
        machine.step()
    plan.add(request(100, 16, 4, owner="small"))
    for _ in range(8):
        machine.step()
    assert 100 in [sequence.request.ticket for sequence in machine.done]
    machine.run()
    assert len(machine.done) == 3


def test_served_tokens_are_even_over_time() -> None:
    plan = schedule(400, sequences=4)
    rng = random.Random(1)
    ticket = 0
    machine = Machine(plan)
    for _ in range(600):
        while plan.waiting < 20:
            ticket += 1
            # Owner a sends long requests, owner b three times as many short ones.
            owner = "a" if ticket % 4 == 0 else "b"
            length = 40 if owner == "a" else 6
            plan.add(request(ticket, rng.randint(1, length), rng.randint(1, length), owner=owner))
        machine.step()
    a, b = plan.served["a"], plan.served["b"]
    assert abs(a - b) < 0.15 * (a + b)


def test_a_long_prompt_blocks_neither_running_sequences_nor_a_short_one_of_another_owner() -> None:
    plan = schedule(1000, tokens=1000, between=8)
    plan.add(request(0, 4, 200, owner="runs"))
    machine = Machine(plan)
    machine.step()
    plan.add(request(1, 600, 2, owner="long"))
    for _ in range(10):
        machine.step()
    plan.add(request(2, 8, 2, owner="short"))
    begun = len(machine.steps)
    while not any(s.request.ticket == 2 for s in machine.done):
        machine.step()
    # Two chunks besides those of the long prompt, each followed by a decode step.
    assert len(machine.steps) - begun <= 6
    assert plan.running == 1
    kinds = [type(step).__name__ for step in machine.steps[1:]]
    assert "PrefillStep, PrefillStep" not in ", ".join(kinds)
    prefills = [step for step in machine.steps[1:] if isinstance(step, PrefillStep)]
    assert all(sum(p.stop - p.start for p in step.chunks) <= 8 for step in prefills)

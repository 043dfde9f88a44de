"""The scheduler: which sequences run next, and which are preempted when pages run out. No tensors.

Two kinds of steps alternate: a prefill computes the keys and values of known tokens (a prompt, or a
preempted sequence), and a decode step samples one token for every running sequence. Long prompts
are prefilled in chunks while other sequences run.

A waiting request is admitted when its pages are free and its adapter is in memory; until then it
holds neither. The owner who has been served the fewest tokens comes next. Requests of one owner
keep their order, except that a request that waits for an adapter can be overtaken.

A request whose prefix is cached, or is being computed by another request, uses those pages and
continues after them. If a running sequence needs a page and none is available, the sequence
admitted last is preempted: it releases its pages and is prefilled again later. Its tokens are kept,
and noise depends only on seed and step, so the result does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tinkex.engine.sampling.fair_queue import FairQueue
from tinkex.engine.sampling.kv_pages import Pages, PageTable
from tinkex.engine.sampling.sequences import (
    AdapterKey,
    PromptLogprobRequest,
    Request,
    SampleSequence,
)
from tinkex.engine.sampling.state_slots import CopyState

#: Tokens of the smallest prefill step, if larger ones do not fit in memory.
SMALLEST_PREFILL = 64


@dataclass(kw_only=True, eq=False)
class Prefill:
    """Known tokens whose keys and values are computed, and the sequences that continue them."""

    request: Request
    tokens: list[int]
    #: What the prefix cache knows the tokens by.
    keys: list[int]
    sequences: list[SampleSequence]
    #: Computed only by the first prefill of a request.
    prompt_logprobs: PromptLogprobRequest
    page_table: PageTable = field(default_factory=PageTable)
    #: Number of tokens in the cache so far.
    computed: int = 0
    #: Tokens found in the prefix cache when it was first admitted.
    cached_tokens: int | None = None
    #: In models with recurrent layers: the slots of the states of its sequences, of which the first
    #: is computed, and after how many tokens that state is kept for others.
    states: list[int] = field(default_factory=list)
    kept_after: list[int] = field(default_factory=list)

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that may come from the cache: none whose logits are needed, nor the last one."""
        needed = self.prompt_logprobs.first_source
        return min(len(self.tokens) - 1, len(self.tokens) if needed is None else needed)


class PrefillChunk(NamedTuple):
    """Tokens `start` to `stop` of a prefill, computed in one step."""

    prefill: Prefill
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prefill.tokens)


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    chunks: Sequence[PrefillChunk]


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    #: Grouped by adapter, then by request.
    sequences: Sequence[SampleSequence]
    #: The sequences have pages for this many more tokens, or for all that they may still sample.
    #: Sequences that need the host for each token sample one.
    steps: int = 1


class CopySlots(NamedTuple):
    """Cache slots to copy before the next step."""

    source: int
    target: int
    length: int


class Scheduler:
    """
    A prefill step has at most `max_batch_tokens`, or `prefill_tokens` while sequences are decoding.

    `load_adapter` is called before a request is admitted. If it returns False, the request keeps
    its place in the queue and is tried again at the next step; others continue. The function may
    also cancel the request. Requests for adapters that `may_load` excludes are skipped.

    In models with recurrent layers (`pages.states`), each admitted sequence has a slot for its state.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        max_sequences: int,
        max_batch_tokens: int,
        prefill_tokens: int | None = None,
        one_request_at_a_time: bool = False,
        load_adapter: Callable[[Request], bool] = lambda _: True,
        may_load: Callable[[AdapterKey], bool] = lambda _: True,
    ) -> None:
        self.pages = pages
        self._load_adapter = load_adapter
        self._may_load = may_load
        self._one_at_a_time = one_request_at_a_time
        states = pages.states
        self._max_sequences = max_sequences if states is None else min(max_sequences, states.count)
        self._state_copies: list[CopyState] = []
        self._max_batch_tokens = max_batch_tokens
        self._prefill_tokens = min(max_batch_tokens, prefill_tokens or max_batch_tokens)
        self._waiting: FairQueue[Prefill] = FairQueue()
        self._prefilling: list[Prefill] = []
        self._running: list[SampleSequence] = []
        self._sorted = True
        self._admitted = 0
        self._prefilled_last = False
        #: Steps are smaller by this factor, after one did not fit in memory.
        self._divisor = 1

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    @property
    def waiting(self) -> int:
        """Number of prefills that have not been admitted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def running_requests(self) -> int:
        """Number of requests that are being prefilled or decoded."""
        prefilling = {prefill.request.ticket for prefill in self._prefilling}
        return len(prefilling | {sequence.request.ticket for sequence in self._running})

    @property
    def served(self) -> dict[str, int]:
        """Token counts of the owners who have work."""
        return self._waiting.served

    def adapters_in_use(self) -> set[AdapterKey]:
        """Adapters of all admitted requests."""
        prefills = {prefill.request.adapter for prefill in self._prefilling}
        return prefills | {sequence.request.adapter for sequence in self._running}

    def adapters_awaited(self) -> set[AdapterKey]:
        return {prefill.request.adapter for prefill in self._waiting}

    def add(self, request: Request) -> None:
        prefill = Prefill(
            request=request,
            tokens=request.prompt,
            keys=request.prompt_keys,
            sequences=[SampleSequence(request=request, index=i) for i in range(request.samples)],
            prompt_logprobs=request.prompt_logprobs,
        )
        self._waiting.add(request.owner, prefill, active=self._active())

    def cancel(self, ticket: int) -> None:
        """Removes a request. Does nothing if it is finished or unknown."""
        for prefill in self._prefilling:
            if prefill.request.ticket == ticket:
                self._release_prefill(prefill)
        for sequence in self._running:
            if sequence.request.ticket == ticket:
                self.pages.release(sequence.page_table)
                self._release_state(sequence)
        self._waiting.retain(lambda prefill: prefill.request.ticket != ticket)
        self._prefilling = [f for f in self._prefilling if f.request.ticket != ticket]
        self._running = [s for s in self._running if s.request.ticket != ticket]

    def preempt_all(self) -> None:
        """Puts all admitted work back into the queue."""
        while self._prefilling or self._running:
            self._preempt_last_admitted()

    def shrink_steps(self) -> bool:
        """Makes steps smaller. Returns False if they are as small as possible."""
        if self._sequence_limit() == 1 and self._budget() == min(
            SMALLEST_PREFILL, self._max_batch_tokens
        ):
            return False
        self._divisor *= 4
        return True

    def grow_steps(self) -> bool:
        """Undoes one `shrink_steps`. Returns whether steps are still smaller than usual."""
        self._divisor = max(1, self._divisor // 4)
        return self._divisor > 1

    def next_step(self, *, decode_steps: int = 1) -> PrefillStep | DecodeStep | None:
        """
        The next step. The caller computes it, then calls `finish_chunk` for each prefill chunk.

        Prefills come first, so that more sequences decode together. After each prefill step follows
        a decode step, so that a stream of new requests does not block running sequences. It is
        short if more prefills follow; otherwise it has up to `decode_steps` tokens.
        """
        if self._running and self._prefilled_last:
            self._prefilled_last = False
            return self._decode_step(1 if self._prefilling or self._waiting else decode_steps)
        self._admit()
        if self._prefilling:
            self._prefilled_last = True
            return PrefillStep(chunks=self._next_chunks())
        return self._decode_step(decode_steps) if self._running else None

    def take_state_copies(self) -> list[CopyState]:
        """States to copy before the next step is computed."""
        copies, self._state_copies = self._state_copies, []
        return copies

    def finish_chunk(self, chunk: PrefillChunk) -> tuple[list[SampleSequence], list[CopySlots]]:
        """
        Call after a chunk was computed. Returns sequences that start decoding, and slots to copy.

        Sequences for which no page is available are queued for their own prefill.
        """
        prefill = chunk.prefill
        prefill.computed = chunk.stop
        self._waiting.charge(prefill.request.owner, chunk.stop - chunk.start)
        request = prefill.request
        self.pages.insert(
            request.adapter, prefill.keys[: chunk.stop], prefill.page_table, owner=request.owner
        )
        if chunk.stop in prefill.kept_after:
            kept = self.pages.keep_state(
                request.adapter, prefill.keys[: chunk.stop], owner=request.owner
            )
            if kept is not None:
                self._state_copies.append(CopyState(prefill.states[0], kept))
        if not chunk.is_last:
            return [], []
        self._prefilling.remove(prefill)
        started, copies = self._fork_sequences(prefill)
        for sequence in started:
            self._admitted += 1
            sequence.admission_number = self._admitted
        self._running.extend(started)
        self._sorted = False
        return started, copies

    def drop_finished(self) -> list[SampleSequence]:
        """Removes finished sequences and releases their pages."""
        finished = [s for s in self._running if s.stop_reason is not None]
        if finished:
            for sequence in finished:
                self._release(sequence)
            self._running = [s for s in self._running if s.stop_reason is None]
        return finished

    def _active(self) -> set[str]:
        """Owners of all admitted requests."""
        return {prefill.request.owner for prefill in self._prefilling} | {
            sequence.request.owner for sequence in self._running
        }

    def _release(self, sequence: SampleSequence) -> None:
        """Releases the pages of a sequence, after adding them to the prefix cache."""
        request = sequence.request
        self.pages.insert(
            request.adapter, sequence.cached_keys, sequence.page_table, owner=request.owner
        )
        self.pages.release(sequence.page_table)
        self._release_state(sequence)

    def _release_state(self, sequence: SampleSequence) -> None:
        if self.pages.states is not None and sequence.state is not None:
            self.pages.states.release(sequence.state)
            sequence.state = None

    def _release_prefill(self, prefill: Prefill) -> None:
        self.pages.release(prefill.page_table)
        if self.pages.states is not None:
            for state in prefill.states:
                self.pages.states.release(state)
            prefill.states = []

    # -- decoding ---------------------------------------------------------------------------------

    def _decode_step(self, steps: int) -> DecodeStep | None:
        """The running sequences, each with pages for its next tokens: `steps`, or only one."""
        pages, asked = self.pages, steps_per_look(self._running, steps)
        # Few sequences need a page: one look at all of them, in most steps, finds none.
        short = self._short_of_pages(self._running, asked)
        for sequence in sorted(self._short_of_pages(short, 1), key=lambda s: s.admission_number):
            while sequence in self._running and not pages.extend(
                sequence.page_table, max_pages=self._max_pages(sequence.request)
            ):
                self._preempt_last_admitted()
        # Others may run after a preemption, and they may need the host more or less often.
        steps = steps_per_look(self._running, steps) if short else asked
        if steps > 1 and short and not self._extend_ahead(steps):
            steps = 1
        served: dict[str, int] = {}
        for sequence in self._running:
            owner = sequence.request.owner
            served[owner] = served.get(owner, 0) + sequence.tokens_ahead(steps)
        for owner, tokens in served.items():
            self._waiting.charge(owner, tokens)
        if not self._sorted:
            # Sequences with the same adapter or prefix become adjacent.
            self._running.sort(key=_decode_order)
            self._sorted = True
        return DecodeStep(sequences=tuple(self._running), steps=steps) if self._running else None

    def _extend_ahead(self, steps: int) -> bool:
        """Adds pages for several tokens. Returns False if too few are available."""
        pages = self.pages
        for sequence in self._short_of_pages(self._running, steps):
            needed = pages.needed(sequence.length + sequence.tokens_ahead(steps) - 1)
            for _ in range(needed - sequence.page_table.page_count):
                if not pages.extend(
                    sequence.page_table, max_pages=self._max_pages(sequence.request)
                ):
                    return False
        return True

    def _short_of_pages(
        self, sequences: Iterable[SampleSequence], steps: int
    ) -> list[SampleSequence]:
        """Those whose pages do not suffice for `steps` more tokens."""
        size, before = self.pages.size, steps - 1
        return [
            s
            for s in sequences
            if len(s.request.prompt) + len(s.tokens) + before > s.page_table.page_count * size
        ]

    def _preempt_last_admitted(self) -> None:
        """Preempts the prefill or sequence admitted last, which may be the one that needs pages."""
        if self._prefilling:
            prefill = self._prefilling.pop()
            self._release_prefill(prefill)
            prefill.computed = 0
            self._waiting.requeue(prefill.request.owner, prefill)
            return
        self._preempt(max(self._running, key=lambda s: s.admission_number))

    def _preempt(self, sequence: SampleSequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        self._waiting.requeue(sequence.request.owner, _resume_prefill(sequence.request, [sequence]))

    def _max_pages(self, request: Request) -> int:
        return self.pages.needed(len(request.prompt) + request.max_new_tokens)

    # -- admission and prefill --------------------------------------------------------------------

    def _budget(self) -> int:
        usual = self._prefill_tokens if self._running else self._max_batch_tokens
        return max(min(usual, SMALLEST_PREFILL), usual // self._divisor)

    def _sequence_limit(self) -> int:
        return max(1, self._max_sequences // self._divisor)

    def _admit(self) -> None:
        """
        Admits waiting prefills until the budget of the step is used.

        A prefill that waits for pages stops admission. One that waits for an adapter is skipped.
        """
        full: set[str] = set()
        # A prefill that waits for a prefix keeps waiting during this call, so check it only once.
        waiting_on_prefix: set[Prefill] = set()
        missing: set[AdapterKey] = set()
        while (prefill := self._candidate(full, waiting_on_prefix, missing)) is not None:
            owner = prefill.request.owner
            left = sum(
                len(f.tokens) - f.computed for f in self._prefilling if f.request.owner == owner
            )
            if left >= self._budget():
                full.add(owner)
                continue
            if self._one_at_a_time and self._other_requests_run(prefill.request):
                return
            free_sequences = self._sequence_limit() - len(self._running)
            free_sequences -= sum(len(f.sequences) for f in self._prefilling)
            if free_sequences < 1:
                if self._preempt_for(owner, 0):
                    continue
                return
            if not self._load_adapter(prefill.request):
                missing.add(prefill.request.adapter)
                continue
            if len(prefill.sequences) > free_sequences:
                rest = prefill.sequences[free_sequences:]
                prefill.sequences = prefill.sequences[:free_sequences]
                self._waiting.insert_after(owner, prefill, _resume_prefill(prefill.request, rest))
            if not self._allocate(prefill):
                if self._preempt_for(owner, self.pages.needed(len(prefill.tokens))):
                    continue
                return
            self._waiting.remove(owner, prefill)
            self._prefilling.append(prefill)

    def _candidate(
        self, full: set[str], waiting_on_prefix: set[Prefill], missing: set[AdapterKey]
    ) -> Prefill | None:
        """
        The next prefill to admit.

        Skips prefills that wait for a prefix that is being computed, or for an adapter.
        """
        prefix_owners: dict[tuple[int, ...], list[Prefill]] = {}
        if self.pages.caches_prefixes:
            for prefill in self._prefilling:
                prefix_owners.setdefault(self._first_page(prefill), []).append(prefill)
        for owner in self._waiting.owners():
            if owner not in full:
                for prefill in self._waiting.work_of(owner):
                    adapter = prefill.request.adapter
                    if (
                        prefill in waiting_on_prefix
                        or adapter in missing
                        or not self._may_load(adapter)
                    ):
                        continue
                    others = (
                        prefix_owners.get(self._first_page(prefill), ()) if prefix_owners else ()
                    )
                    if not any(self._waits_on_prefix(prefill, other) for other in others):
                        return prefill
                    waiting_on_prefix.add(prefill)
        return None

    def _first_page(self, prefill: Prefill) -> tuple[int, ...]:
        return tuple(prefill.keys[: self.pages.size])

    def _waits_on_prefix(self, prefill: Prefill, other: Prefill) -> bool:
        """Whether `other` is computing a page that `prefill` can use afterwards."""
        size = self.pages.size
        page = other.computed // size
        mine, theirs = prefill.request, other.request
        if (mine.adapter, mine.owner) != (theirs.adapter, theirs.owner):
            return False
        stop = (page + 1) * size
        if prefill.max_cached_tokens < stop or len(other.tokens) < stop:
            return False
        return prefill.keys[:stop] == other.keys[:stop]

    def _allocate(self, prefill: Prefill) -> bool:
        """Allocates pages for a prefill, using cached ones. Returns False if there are too few."""
        pages, length = self.pages, len(prefill.tokens)
        request, max_cached = prefill.request, prefill.max_cached_tokens // pages.size
        cached = pages.find(request.adapter, prefill.keys, max_cached, owner=request.owner)
        needed = pages.needed(length)
        found, kept = len(cached), None
        if pages.states is not None:
            count, kept = pages.last_state(cached)
            cached = cached[:count]
        if self._running or self._prefilling:
            # Require one spare page for each sequence, running or new, so that the prefill is not
            # preempted in the next step.
            spare = len(self._running) + len(prefill.sequences) if self._running else 0
            if pages.pages_taken(needed, cached) + spare > pages.available:
                return False
        page_table = pages.allocate(
            needed, max_pages=self._max_pages(prefill.request), cached=cached
        )
        if page_table is None:
            return False
        prefill.page_table, prefill.computed = page_table, len(cached) * pages.size
        if pages.states is not None:
            if kept is not None:
                pages.states.touch(kept)
            prefill.states = [pages.states.take() for _ in prefill.sequences]
            if kept is not None:
                self._state_copies.append(CopyState(kept, prefill.states[0]))
            # At the last border of a page, for the same prompt and for its continuations. And where
            # it leaves tokens that are cached already, for others that share these.
            places = [found * pages.size, (length - 1) // pages.size * pages.size]
            prefill.kept_after = [
                each for each in places if pages.caches_prefixes and each > prefill.computed
            ]
        if prefill.cached_tokens is None:
            prefill.cached_tokens = prefill.computed
        return True

    def _preempt_for(self, owner: str, needed: int) -> bool:
        """
        Preempts the last admitted sequence of an owner who has more than an equal share.

        Only for an owner within an equal share, so that two owners never preempt each other.
        """
        owners = self._active() | set(self._waiting.owners())
        if len(owners) < 2:
            return False
        count, pages = dict.fromkeys(owners, 0), dict.fromkeys(owners, 0)
        for sequence in self._running:
            count[sequence.request.owner] += 1
            pages[sequence.request.owner] += sequence.page_table.page_count
        for prefill in self._prefilling:
            count[prefill.request.owner] += len(prefill.sequences)
            pages[prefill.request.owner] += prefill.page_table.page_count
        sequences_each = self._sequence_limit() // len(owners)
        pages_each = self.pages.count // len(owners)
        if count[owner] + 1 > sequences_each or pages[owner] + needed > pages_each:
            return False
        over_share = [
            sequence
            for sequence in self._running
            if (pages if needed else count)[sequence.request.owner]
            > (pages_each if needed else sequences_each)
        ]
        if not over_share:
            return False
        self._preempt(max(over_share, key=lambda s: s.admission_number))
        return True

    def _other_requests_run(self, request: Request) -> bool:
        started = [prefill.request for prefill in self._prefilling] + [
            s.request for s in self._running
        ]
        return any(other is not request for other in started)

    def _next_chunks(self) -> list[PrefillChunk]:
        """The chunks of one step: owners get equal shares, each owner's prefills in order."""
        by_owner: dict[str, list[Prefill]] = {}
        for prefill in self._prefilling:
            by_owner.setdefault(prefill.request.owner, []).append(prefill)
        chunks = []
        budget = self._budget()
        # The owner with the least work comes first and leaves its unused share to the others.
        queues = sorted(
            by_owner.values(), key=lambda prefills: sum(len(f.tokens) for f in prefills)
        )
        for position, prefills in enumerate(queues):
            left = budget // (len(queues) - position)
            for prefill in prefills:
                stop = min(len(prefill.tokens), prefill.computed + left)
                stop = min([stop, *(at for at in prefill.kept_after if at > prefill.computed)])
                if stop > prefill.computed:
                    chunks.append(PrefillChunk(prefill, prefill.computed, stop))
                    left -= stop - prefill.computed
                    budget -= stop - prefill.computed
        # Tokens of one adapter become adjacent.
        chunks.sort(key=lambda chunk: chunk.prefill.request.adapter or "")
        return chunks

    def _fork_sequences(self, prefill: Prefill) -> tuple[list[SampleSequence], list[CopySlots]]:
        """
        Gives the pages of a finished prefill to its sequences.

        The first sequence continues in them. The others share the full pages and copy the last,
        partial page. Sequences for which no page is available are queued again.
        """
        pages, length = self.pages, len(prefill.tokens)
        first, *others = prefill.sequences
        full, partial = divmod(length, pages.size)
        first.page_table = prefill.page_table
        started, copies = [first], []
        for sequence in others:
            sequence.page_table = pages.fork(prefill.page_table, full)
            if partial:
                own = pages.allocate(1, max_pages=self._max_pages(prefill.request) - full)
                if own is None:
                    pages.release(sequence.page_table)
                    break
                page = own.extents[0].first
                sequence.page_table.add_extent(page, 1)
                sequence.page_table.reserved = own.reserved
                source = pages.slot(prefill.page_table, full * pages.size)
                copies.append(CopySlots(source, page * pages.size, partial))
            started.append(sequence)
        if pages.states is not None:
            for sequence, state in zip(started, prefill.states, strict=False):
                sequence.state = state
            for state in prefill.states[1 : len(started)]:
                self._state_copies.append(CopyState(prefill.states[0], state))
            for state in prefill.states[len(started) :]:
                pages.states.release(state)
        if rest := prefill.sequences[len(started) :]:
            self._waiting.requeue(prefill.request.owner, _resume_prefill(prefill.request, rest))
        return started, copies


def steps_per_look(sequences: Sequence[SampleSequence], most: int) -> int:
    """
    How many tokens sequences sample before the host looks.

    Sequences that need the host for each token get one of them per look. A few of them do not slow
    the others; if they are many, the looks become as frequent as they are.
    """
    by_host = sum(sequence.request.sampling.needs_host for sequence in sequences)
    if not by_host:
        return most
    return max(1, min(most, (len(sequences) - by_host) // by_host))


def _decode_order(sequence: SampleSequence) -> tuple[str, list[int], int, int]:
    request = sequence.request
    first_pages = [extent.first for extent in sequence.page_table.extents]
    return request.adapter or "", first_pages, request.ticket, sequence.index


def _resume_prefill(request: Request, sequences: list[SampleSequence]) -> Prefill:
    """A prefill without prompt logprobs: for a preempted sequence or postponed samples."""
    sampled = sequences[0].tokens
    return Prefill(
        request=request,
        tokens=request.prompt + sampled,
        keys=request.prompt_keys + sampled,
        sequences=sequences,
        prompt_logprobs=PromptLogprobRequest(),
        cached_tokens=0,
    )


def adapter_ranges(sequences: Iterable[SampleSequence]) -> list[tuple[int, int, AdapterKey]]:
    """Ranges (start, stop, adapter) of adjacent sequences with the same adapter."""
    ranges: list[tuple[int, int, AdapterKey]] = []
    for at, sequence in enumerate(sequences):
        key = sequence.request.adapter
        if ranges and ranges[-1][2] == key:
            ranges[-1] = (ranges[-1][0], at + 1, key)
        else:
            ranges.append((at, at + 1, key))
    return ranges

"""Which sequences run next, and who makes room when the cache is full. Knows no tensors.

Two kinds of step take turns: a fill computes the keys and values of known tokens (a prompt, or a
sequence that had to make room), a decode draws one token for every running sequence. Long prompts
are filled in pieces while others run. Waiting work is admitted as soon as its pages are free and its
adapter is in memory: the owner who got the fewest tokens comes next, each owner's requests in order
of arrival. Who waits for an adapter is overtaken by those whose adapter is in memory. What waits
holds neither pages nor an adapter. What begins with tokens that are in the cache, or are just being computed, takes their pages and goes on from
there. When a running sequence needs a page and there is none, the youngest gives back all of its
pages and waits to be filled again: its tokens are kept, and since noise depends on seed and position
only, it goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tinkex.engine.sampling.fair_queue import Turns
from tinkex.engine.sampling.kv_pages import Holding, Pages
from tinkex.engine.sampling.sequences import AdapterKey, PromptQuestions, Request, SampleSequence


@dataclass(kw_only=True, eq=False)
class Fill:
    """Known tokens to be computed, and the sequences that go on from their end."""

    request: Request
    tokens: list[int]
    sequences: list[SampleSequence]
    #: Only the first fill of a request answers them.
    questions: PromptQuestions
    holding: Holding = field(default_factory=Holding)
    #: Tokens computed so far.
    done: int = 0
    #: Tokens that did not have to be computed when it was first admitted.
    found: int | None = None

    @property
    def may_find(self) -> int:
        """So many tokens need not be computed: the last one must be, and what is asked about."""
        needed = self.questions.first_row
        return min(len(self.tokens) - 1, len(self.tokens) if needed is None else needed)


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a fill, computed in one pass."""

    fill: Fill
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.fill.tokens)


@dataclass(frozen=True, kw_only=True)
class FillStep:
    pieces: Sequence[Piece]


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    #: Grouped by adapter, then by request.
    sequences: Sequence[SampleSequence]


class CopyRows(NamedTuple):
    """Cache rows to copy before the next step."""

    source: int
    target: int
    length: int


class Schedule:
    """
    `max_batch_tokens` are filled in one step, or `fill_tokens` while sequences run: they wait.

    `load_adapter` is asked before a request is admitted. On False the request keeps its place in line
    and is asked about again at the next step; others go on. The function may also cancel it. Requests
    for adapters that `may_load` excludes are passed over without being asked about.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        max_sequences: int,
        max_batch_tokens: int,
        fill_tokens: int | None = None,
        one_request_at_a_time: bool = False,
        load_adapter: Callable[[Request], bool] = lambda _: True,
        may_load: Callable[[AdapterKey], bool] = lambda _: True,
    ) -> None:
        self.pages = pages
        self._load_adapter = load_adapter
        self._may_load = may_load
        self._one_at_a_time = one_request_at_a_time
        self._max_sequences = max_sequences
        self._max_batch_tokens = max_batch_tokens
        self._fill_tokens = min(max_batch_tokens, fill_tokens or max_batch_tokens)
        self._waiting: Turns[Fill] = Turns()
        self._filling: list[Fill] = []
        self._running: list[SampleSequence] = []
        self._sorted = True
        self._admitted = 0
        self._filled_last = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._filling or self._running)

    @property
    def waiting(self) -> int:
        """Fills that have not been admitted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def served(self) -> dict[str, int]:
        """Tokens computed for each owner who has work here."""
        return self._waiting.served

    def adapters_in_use(self) -> set[AdapterKey]:
        """Those of everything that is admitted."""
        fills = {fill.request.adapter for fill in self._filling}
        return fills | {sequence.request.adapter for sequence in self._running}

    def adapters_waited_for(self) -> set[AdapterKey]:
        return {fill.request.adapter for fill in self._waiting}

    def add(self, request: Request) -> None:
        fill = Fill(
            request=request,
            tokens=request.prompt,
            sequences=[SampleSequence(request=request, index=i) for i in range(request.samples)],
            questions=request.questions,
        )
        self._waiting.arrive(request.owner, fill, active=self._active())

    def cancel(self, ticket: int) -> None:
        """Forgets everything of one request; harmless when there is nothing left."""
        for fill in self._filling:
            if fill.request.ticket == ticket:
                self.pages.close(fill.holding)
        for sequence in self._running:
            if sequence.request.ticket == ticket:
                self.pages.close(sequence.holding)
        self._waiting.keep(lambda fill: fill.request.ticket != ticket)
        self._filling = [f for f in self._filling if f.request.ticket != ticket]
        self._running = [s for s in self._running if s.request.ticket != ticket]

    def next_step(self) -> FillStep | DecodeStep | None:
        """
        What to compute now. The caller computes it and reports with `filled` or `drawn`.

        Fills come first, so that more sequences decode together; after each one everybody who
        runs gets a token, so that a stream of arrivals stops nobody.
        """
        if self._running and self._filled_last:
            self._filled_last = False
            return self._decode_step()
        self._admit()
        if self._filling:
            self._filled_last = True
            return FillStep(pieces=self._pieces())
        return self._decode_step() if self._running else None

    def filled(self, piece: Piece) -> tuple[list[SampleSequence], list[CopyRows]]:
        """
        After a piece was computed: the sequences that were born by it, and the rows they need.

        Sequences that find no page wait for another fill of their own.
        """
        fill = piece.fill
        fill.done = piece.stop
        self._waiting.charge(fill.request.owner, piece.stop - piece.start)
        request = fill.request
        self.pages.remember(
            request.adapter, fill.tokens[: piece.stop], fill.holding, owner=request.owner
        )
        if not piece.is_last:
            return [], []
        self._filling.remove(fill)
        born, copies = self._hand_over(fill)
        for sequence in born:
            self._admitted += 1
            sequence.age = self._admitted
        self._running.extend(born)
        self._sorted = False
        return born, copies

    def drop_finished(self) -> list[SampleSequence]:
        """Takes out the sequences that are over and gives their pages back."""
        finished = [s for s in self._running if s.stop_reason is not None]
        if finished:
            for sequence in finished:
                self._close(sequence)
            self._running = [s for s in self._running if s.stop_reason is None]
        return finished

    def _active(self) -> set[str]:
        """The owners of everything that is admitted."""
        return {fill.request.owner for fill in self._filling} | {
            sequence.request.owner for sequence in self._running
        }

    def _close(self, sequence: SampleSequence) -> None:
        """What it computed can be found by those who begin with the same tokens."""
        request = sequence.request
        self.pages.remember(
            request.adapter, sequence.computed, sequence.holding, owner=request.owner
        )
        self.pages.close(sequence.holding)

    # -- decoding ---------------------------------------------------------------------------------

    def _decode_step(self) -> DecodeStep | None:
        """The running sequences, each with a page for the token that it computes next."""
        pages = self.pages
        short = [s for s in self._running if pages.needed(s.known) > s.holding.page_count]
        for sequence in sorted(short, key=lambda s: s.age):
            while sequence in self._running and not pages.extend(
                sequence.holding, most=self._most_pages(sequence.request)
            ):
                self._make_room()
        for sequence in self._running:
            self._waiting.charge(sequence.request.owner, 1)
        if not self._sorted:
            # Neighbours share adapters, and beginnings.
            self._running.sort(key=_neighbourhood)
            self._sorted = True
        return DecodeStep(sequences=tuple(self._running)) if self._running else None

    def _make_room(self) -> None:
        """The youngest gives up its pages and waits, even if it is the one in need."""
        if self._filling:
            fill = self._filling.pop()
            self.pages.close(fill.holding)
            fill.done = 0
            self._waiting.put_back(fill.request.owner, fill)
            return
        self._set_aside(max(self._running, key=lambda s: s.age))

    def _set_aside(self, sequence: SampleSequence) -> None:
        self._running.remove(sequence)
        self._close(sequence)
        self._waiting.put_back(sequence.request.owner, _refill(sequence.request, [sequence]))

    def _most_pages(self, request: Request) -> int:
        return self.pages.needed(len(request.prompt) + request.max_new_tokens)

    # -- filling ----------------------------------------------------------------------------------

    def _budget(self) -> int:
        return self._fill_tokens if self._running else self._max_batch_tokens

    def _admit(self) -> None:
        """
        Everybody who fits, until there is enough to fill.

        Nobody overtakes a request that waits for pages. One that waits for an adapter is overtaken.
        """
        full: set[str] = set()
        # Who follows somebody goes on following while more are admitted: asked once.
        following: set[Fill] = set()
        missing: set[AdapterKey] = set()
        while (fill := self._candidate(full, following, missing)) is not None:
            owner = fill.request.owner
            left = sum(len(f.tokens) - f.done for f in self._filling if f.request.owner == owner)
            if left >= self._budget():
                full.add(owner)
                continue
            if self._one_at_a_time and self._others_run(fill.request):
                return
            places = self._max_sequences - len(self._running)
            places -= sum(len(f.sequences) for f in self._filling)
            if places < 1:
                if self._give_way(owner, 0):
                    continue
                return
            if not self._load_adapter(fill.request):
                missing.add(fill.request.adapter)
                continue
            if len(fill.sequences) > places:
                rest = fill.sequences[places:]
                fill.sequences = fill.sequences[:places]
                self._waiting.put_behind(owner, fill, _refill(fill.request, rest))
            if not self._open(fill):
                if self._give_way(owner, self.pages.needed(len(fill.tokens))):
                    continue
                return
            self._waiting.take(owner, fill)
            self._filling.append(fill)

    def _candidate(
        self, full: set[str], following: set[Fill], missing: set[AdapterKey]
    ) -> Fill | None:
        """
        The next in line.

        Leaves out who begins as somebody does who is being filled, and who has to wait for an adapter.
        """
        leaders: dict[tuple[int, ...], list[Fill]] = {}
        if self.pages.remembers:
            for fill in self._filling:
                leaders.setdefault(self._first_page(fill), []).append(fill)
        for owner in self._waiting.owners():
            if owner not in full:
                for fill in self._waiting.of(owner):
                    adapter = fill.request.adapter
                    if fill in following or adapter in missing or not self._may_load(adapter):
                        continue
                    alike = leaders.get(self._first_page(fill), ()) if leaders else ()
                    if not any(self._follows(fill, other) for other in alike):
                        return fill
                    following.add(fill)
        return None

    def _first_page(self, fill: Fill) -> tuple[int, ...]:
        return tuple(fill.tokens[: self.pages.size])

    def _follows(self, fill: Fill, other: Fill) -> bool:
        """Whether `other` is computing a page that `fill` could take when it is there."""
        size = self.pages.size
        page = other.done // size
        mine, theirs = fill.request, other.request
        if (mine.adapter, mine.owner) != (theirs.adapter, theirs.owner):
            return False
        stop = (page + 1) * size
        if fill.may_find < stop or len(other.tokens) < stop:
            return False
        return fill.tokens[:stop] == other.tokens[:stop]

    def _open(self, fill: Fill) -> bool:
        """Pages for a fill, those that are in the cache first; False when there are too few."""
        pages, length = self.pages, len(fill.tokens)
        request, most = fill.request, fill.may_find // pages.size
        known = pages.find(request.adapter, fill.tokens, most, owner=request.owner)
        needed = pages.needed(length)
        if self._running or self._filling:
            # One page beyond the known tokens for each sequence, and one for each that runs:
            # who is admitted should not be the one to make room in the next step.
            spare = len(self._running) + len(fill.sequences) if self._running else 0
            if pages.taken(needed, known) + spare > pages.available:
                return False
        holding = pages.open(needed, most=self._most_pages(fill.request), known=known)
        if holding is None:
            return False
        fill.holding, fill.done = holding, len(known) * pages.size
        if fill.found is None:
            fill.found = fill.done
        return True

    def _give_way(self, owner: str, needed: int) -> bool:
        """
        Sets aside the youngest sequence of an owner who has more than an even share.

        Only for somebody who stays within theirs, so that two owners never push each other out.
        """
        owners = self._active() | set(self._waiting.owners())
        if len(owners) < 2:
            return False
        count, pages = dict.fromkeys(owners, 0), dict.fromkeys(owners, 0)
        for sequence in self._running:
            count[sequence.request.owner] += 1
            pages[sequence.request.owner] += sequence.holding.page_count
        for fill in self._filling:
            count[fill.request.owner] += len(fill.sequences)
            pages[fill.request.owner] += fill.holding.page_count
        places_each = self._max_sequences // len(owners)
        pages_each = self.pages.count // len(owners)
        if count[owner] + 1 > places_each or pages[owner] + needed > pages_each:
            return False
        crowding = [
            sequence
            for sequence in self._running
            if (pages if needed else count)[sequence.request.owner]
            > (pages_each if needed else places_each)
        ]
        if not crowding:
            return False
        self._set_aside(max(crowding, key=lambda s: s.age))
        return True

    def _others_run(self, request: Request) -> bool:
        started = [fill.request for fill in self._filling] + [s.request for s in self._running]
        return any(other is not request for other in started)

    def _pieces(self) -> list[Piece]:
        """As much as one step takes: owners share it evenly, each owner's fills go in order."""
        by_owner: dict[str, list[Fill]] = {}
        for fill in self._filling:
            by_owner.setdefault(fill.request.owner, []).append(fill)
        pieces = []
        budget = self._budget()
        # Who has least to do comes first, and leaves what it does not use to the others.
        shares = sorted(by_owner.values(), key=lambda fills: sum(len(f.tokens) for f in fills))
        for position, fills in enumerate(shares):
            left = budget // (len(shares) - position)
            for fill in fills:
                stop = min(len(fill.tokens), fill.done + left)
                if stop > fill.done:
                    pieces.append(Piece(fill, fill.done, stop))
                    left -= stop - fill.done
                    budget -= stop - fill.done
        # By adapter, so that the rows of one adapter lie together.
        pieces.sort(key=lambda piece: piece.fill.request.adapter or "")
        return pieces

    def _hand_over(self, fill: Fill) -> tuple[list[SampleSequence], list[CopyRows]]:
        """
        The fill's pages to its sequences.

        The first goes on in them. The others share the full pages and copy the one begun; those
        that find no page for it wait.
        """
        pages, length = self.pages, len(fill.tokens)
        first, *others = fill.sequences
        full, begun = divmod(length, pages.size)
        first.holding = fill.holding
        born, copies = [first], []
        for sequence in others:
            sequence.holding = pages.fork(fill.holding, full)
            if begun:
                own = pages.open(1, most=self._most_pages(fill.request) - full)
                if own is None:
                    pages.close(sequence.holding)
                    break
                sequence.holding.spans += own.spans
                sequence.holding.promised = own.promised
                source = pages.row(fill.holding, full * pages.size)
                copies.append(CopyRows(source, own.spans[0].first * pages.size, begun))
            born.append(sequence)
        if rest := fill.sequences[len(born) :]:
            self._waiting.put_back(fill.request.owner, _refill(fill.request, rest))
        return born, copies


def _neighbourhood(sequence: SampleSequence) -> tuple[str, list[int], int, int]:
    request = sequence.request
    begins = [span.first for span in sequence.holding.spans]
    return request.adapter or "", begins, request.ticket, sequence.index


def _refill(request: Request, sequences: list[SampleSequence]) -> Fill:
    """A fill that answers no questions: for one sequence that goes on, or some that begin."""
    tokens = request.prompt + sequences[0].tokens
    return Fill(
        request=request, tokens=tokens, sequences=sequences, questions=PromptQuestions(), found=0
    )


def groups(sequences: Iterable[SampleSequence]) -> list[tuple[int, int, AdapterKey]]:
    """Ranges of neighbours with the same adapter."""
    ranges: list[tuple[int, int, AdapterKey]] = []
    for at, sequence in enumerate(sequences):
        key = sequence.request.adapter
        if ranges and ranges[-1][2] == key:
            ranges[-1] = (ranges[-1][0], at + 1, key)
        else:
            ranges.append((at, at + 1, key))
    return ranges


class SharedRun(NamedTuple):
    """Cache rows `start` to `stop` are read by sequences `first` to `last`."""

    start: int
    stop: int
    first: int
    last: int


class RunLevel(NamedTuple):
    runs: list[SharedRun]
    #: The sequences in the order of the runs.
    rows: list[int]


#: Costs of attention on a CPU in cache rows read, measured on two cores with 32 sequences of 32 to
#: 512 tokens: a call costs as much as so many rows, and a rectangle as much as so many calls.
CALL_ROWS = 200
TABLE_CALLS = 8
#: A row of a rectangle is copied before it is read.
COPY_FACTOR = 1.3
#: Longer sequences do not fit the processor's cache, and then copies cost more than that.
LONGEST_IN_TABLE = 384


def run_levels(pages: Pages, sequences: Sequence[SampleSequence]) -> list[RunLevel]:
    """
    What each sequence reads, as runs of cache rows: level i has everybody's i-th run.

    Neighbours with the same beginning read it together, where that is worth another call for
    those whose run goes on behind it.
    """
    left = [list(pages.rows(s.holding, s.known))[::-1] for s in sequences]
    levels: list[RunLevel] = []
    while reading := [at for at, runs in enumerate(left) if runs]:
        level = RunLevel([], reading)
        first = 0
        while first < len(reading):
            at = reading[first]
            start, stop = left[at][-1]
            last = first + 1
            while (
                last < len(reading)
                and reading[last] == at + last - first
                and left[reading[last]][-1][0] == start
            ):
                last += 1
            group = reading[first:last]
            common = min(left[one][-1][1] for one in group)
            longer = sum(1 for one in group if left[one][-1][1] > common)
            if longer and common - start < CALL_ROWS * longer / max(1, len(group) - 1):
                # Not worth it: only those who read exactly the same do so together.
                common = stop
                same = [left[one][-1][1] == stop for one in group]
                group = group[: same.index(False)] if False in same else group
            for one in group:
                end = left[one].pop()[1]
                if end > common:
                    left[one].append((common, end))
            level.runs.append(SharedRun(start, common, at, at + len(group)))
            first += len(group)
        levels.append(level)
    return levels


def table_is_cheaper(levels: Sequence[RunLevel], lengths: Sequence[int]) -> bool:
    """Whether to copy all that is read into one rectangle rather than read run by run."""
    if max(lengths) > LONGEST_IN_TABLE:
        return False
    runs = [run for level in levels for run in level.runs]
    by_run = len(runs) * CALL_ROWS + sum(run.stop - run.start for run in runs)
    rectangle = max(lengths) * len(lengths) * COPY_FACTOR
    return TABLE_CALLS * CALL_ROWS + rectangle < by_run

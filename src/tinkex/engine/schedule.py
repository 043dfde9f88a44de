"""Which sequences run next, and who makes room when the cache is full. Knows no tensors.

Two kinds of step take turns: a fill computes the keys and values of known tokens (a prompt, or a
sequence that had to make room), a decode draws one token for every running sequence. Waiting work is
admitted in order of arrival as soon as its pages are free. When a running sequence needs a page and
there is none, the youngest gives back all of its pages and waits to be filled again: its tokens are
kept, and since noise depends on seed and position only, it goes on as if nothing had happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tinkex.engine.blocks import Holding, Pages
from tinkex.engine.sequences import AdapterKey, PromptQuestions, Request, SampleSequence


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
    def __init__(
        self,
        pages: Pages,
        *,
        max_sequences: int,
        max_batch_tokens: int,
        one_request_at_a_time: bool = False,
    ) -> None:
        self.pages = pages
        self._one_at_a_time = one_request_at_a_time
        self._max_sequences = max_sequences
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Fill] = deque()
        self._filling: list[Fill] = []
        self._running: list[SampleSequence] = []
        self._admitted = 0
        self._filled_last = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._filling or self._running)

    def adapters_in_use(self) -> set[AdapterKey]:
        fills = {fill.request.adapter for fill in (*self._waiting, *self._filling)}
        return fills | {sequence.request.adapter for sequence in self._running}

    def add(self, request: Request) -> None:
        self._waiting.append(
            Fill(
                request=request,
                tokens=request.prompt,
                sequences=[
                    SampleSequence(request=request, index=i) for i in range(request.samples)
                ],
                questions=request.questions,
            )
        )

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens could ever run."""
        return self.pages.needed(tokens) <= self.pages.count

    def cancel(self, ticket: int) -> None:
        """Forgets everything of one request; harmless when there is nothing left."""
        for fill in self._filling:
            if fill.request.ticket == ticket:
                self.pages.close(fill.holding)
        for sequence in self._running:
            if sequence.request.ticket == ticket:
                self.pages.close(sequence.holding)
        self._waiting = deque(f for f in self._waiting if f.request.ticket != ticket)
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
        if not piece.is_last:
            return [], []
        self._filling.remove(fill)
        born, copies = self._hand_over(fill)
        for sequence in born:
            self._admitted += 1
            sequence.age = self._admitted
        self._running.extend(born)
        # Neighbours share adapters, and samples of one prompt share its pages.
        self._running.sort(key=lambda s: (s.request.adapter or "", s.request.ticket, s.index))
        return born, copies

    def drop_finished(self) -> list[SampleSequence]:
        """Takes out the sequences that are over and gives their pages back."""
        finished = [s for s in self._running if s.stop_reason is not None]
        if finished:
            for sequence in finished:
                self.pages.close(sequence.holding)
            self._running = [s for s in self._running if s.stop_reason is None]
        return finished

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
        return DecodeStep(sequences=tuple(self._running)) if self._running else None

    def _make_room(self) -> None:
        """The youngest gives up its pages and waits, even if it is the one in need."""
        if self._filling:
            fill = self._filling.pop()
            self.pages.close(fill.holding)
            fill.done = 0
            self._waiting.appendleft(fill)
            return
        youngest = max(self._running, key=lambda s: s.age)
        self._running.remove(youngest)
        self.pages.close(youngest.holding)
        self._waiting.appendleft(_refill(youngest.request, [youngest]))

    def _most_pages(self, request: Request) -> int:
        return self.pages.needed(len(request.prompt) + request.max_new_tokens)

    # -- filling ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        tokens = sum(len(fill.tokens) - fill.done for fill in self._filling)
        while self._waiting and tokens < self._max_batch_tokens:
            fill = self._waiting[0]
            if self._one_at_a_time and self._others_run(fill.request):
                return
            places = self._max_sequences - len(self._running)
            places -= sum(len(f.sequences) for f in self._filling)
            if places < 1:
                return
            if len(fill.sequences) > places:
                self._split(fill, places)
            length = len(fill.tokens)
            # One page beyond the known tokens for each sequence, and one for each that runs:
            # who is admitted should not be the one to make room in the next step.
            spare = len(self._running) + len(fill.sequences) if self._running else 0
            needed = self.pages.needed(length)
            if needed + spare > self.pages.available and (self._running or self._filling):
                return
            holding = self.pages.open(needed, most=self._most_pages(fill.request))
            if holding is None:
                return
            self._waiting.popleft()
            fill.holding, fill.done = holding, 0
            self._filling.append(fill)
            tokens += length

    def _others_run(self, request: Request) -> bool:
        started = [fill.request for fill in self._filling] + [s.request for s in self._running]
        return any(other is not request for other in started)

    def _split(self, fill: Fill, count: int) -> None:
        """Only `count` sequences now; the others wait for a fill of their own."""
        rest = fill.sequences[count:]
        fill.sequences = fill.sequences[:count]
        self._waiting.insert(1, _refill(fill.request, rest))

    def _pieces(self) -> list[Piece]:
        pieces = []
        left = self._max_batch_tokens
        for fill in self._filling:
            if left <= 0:
                break
            stop = min(len(fill.tokens), fill.done + left)
            pieces.append(Piece(fill, fill.done, stop))
            left -= stop - fill.done
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
            self._waiting.appendleft(_refill(fill.request, rest))
        return born, copies


def _refill(request: Request, sequences: list[SampleSequence]) -> Fill:
    """A fill that answers no questions: for one sequence that goes on, or some that begin."""
    tokens = request.prompt + sequences[0].tokens
    return Fill(request=request, tokens=tokens, sequences=sequences, questions=PromptQuestions())


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


def run_levels(pages: Pages, sequences: Sequence[SampleSequence]) -> list[RunLevel]:
    """
    What each sequence reads, as runs of cache rows: level i has everybody's i-th run.

    Neighbours with the same run (the shared pages of one prompt) are put together.
    """
    levels: list[RunLevel] = []
    for at, sequence in enumerate(sequences):
        for depth, (start, stop) in enumerate(pages.rows(sequence.holding, sequence.known)):
            if depth == len(levels):
                levels.append(RunLevel([], []))
            runs, rows = levels[depth]
            rows.append(at)
            last = runs[-1] if runs else None
            if last is not None and last[:2] == (start, stop) and last.last == at:
                runs[-1] = last._replace(last=at + 1)
            else:
                runs.append(SharedRun(start, stop, at, at + 1))
    return levels


#: Costs of attention on a CPU in cache rows read, measured on two cores with 32 sequences of 32 to
#: 512 tokens: a call costs as much as so many rows, and a rectangle as much as so many calls.
CALL_ROWS = 200
TABLE_CALLS = 8
#: A row of a rectangle is copied before it is read.
COPY_FACTOR = 1.3
#: Longer sequences do not fit the processor's cache, and then copies cost more than that.
LONGEST_IN_TABLE = 384


def table_is_cheaper(levels: Sequence[RunLevel], lengths: Sequence[int]) -> bool:
    """Whether to copy all that is read into one rectangle rather than read run by run."""
    if max(lengths) > LONGEST_IN_TABLE:
        return False
    runs = [run for level in levels for run in level.runs]
    by_run = len(runs) * CALL_ROWS + sum(run.stop - run.start for run in runs)
    rectangle = max(lengths) * len(lengths) * COPY_FACTOR
    return TABLE_CALLS * CALL_ROWS + rectangle < by_run

"""The sampler: continuous batching over one cache, for many adapters and the base at once."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.adapters import checkpoints
from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.adapters.checkpoints import SavedAdapter, describe_difference
from tinkex.engine.adapters.memory_plan import Resident
from tinkex.engine.model.attention import CacheLayer, CacheUse, Level, Packing, Reach, Run, Table
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.lora import Layout, Route, make_layout
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.prompt_logprobs import PromptAnswers
from tinkex.engine.sampling.sample_checks import SampleChecks
from tinkex.engine.sampling.scheduler import (
    CopyRows,
    DecodeStep,
    FillStep,
    Piece,
    RunLevel,
    Schedule,
    groups,
    run_levels,
    table_is_cheaper,
)
from tinkex.engine.sampling.sequences import (
    AdapterKey,
    Request,
    SampleSequence,
)
from tinkex.engine.sampling.token_sampling import Draw, pick
from tinkex.engine.settings import EngineSettings
from tinkex.engine.training.request_checks import Limits
from tinkex.wire.errors import UserFailure
from tinkex.wire.sampling import (
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TopkLogprobs,
)

log = logging.getLogger(__name__)

# T packed tokens, H hidden size

#: Tokens in a page. Small pages waste little at the end of a sequence; runs of neighbours are
#: read as one, so their number costs nothing.
PAGE_TOKENS = 16

#: Tokens drawn for everybody before others get their turn, and seconds after which no other step
#: is begun.
BURST_STEPS = 8
BURST_S = 0.25

#: Prompt tokens filled in one step while nobody runs, and while others wait for their next token.
FILL_TOKENS = {"cpu": 2048, "cuda": 8192}
FILL_TOKENS_BETWEEN = {"cpu": 512, "cuda": 2048}

#: Of the cache, for beginnings that nobody uses at the moment: a share and most bytes. On a CPU what
#: was never written takes no memory, so keeping everything would make an idle server large.
IDLE_SHARE = {"cpu": 0.25, "cuda": 1.0}
IDLE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 40}

#: While a request waits for room for its adapter, others sample with the adapters in memory for so
#: many seconds. After that they wait until it has room, or a steady stream of them would keep it out.
ROOM_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    ticket: int
    outcome: SampleResponse | Exception


@dataclass(frozen=True, kw_only=True)
class Grown:
    """Tokens that a sequence of a streamed request got since it was last asked about."""

    ticket: int
    sequence: int
    #: The place of the first of them.
    start: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(kw_only=True)
class _Answer:
    """What is known of one request's answer."""

    request: Request
    sequences: list[SampleSequence] = field(default_factory=list)
    prompt: PromptAnswers
    #: Prompt tokens that were in the cache.
    found: int = 0


@dataclass(kw_only=True)
class _Reading:
    """An adapter that is being read from its folder, or has been and waits for room."""

    key: str
    adapter: Future[SamplerAdapter]
    #: When it began to wait for room.
    waits_from_s: float | None = None


class Sampler:
    def __init__(
        self,
        model: BaseModel,
        settings: EngineSettings,
        *,
        max_batch_tokens: int,
        kv_tokens: int,
        must_wait: Callable[[int], bool],
        make_room: Callable[[int, str], None],
        clock: Callable[[], int],
    ) -> None:
        #: Whether an adapter of this size fits only after one that is in use has left.
        self._must_wait = must_wait
        #: Called with a size and what it is for before an adapter is loaded; may refuse.
        self._make_room = make_room
        #: Counts uses of adapters, here and in training alike.
        self._clock = clock
        self._model = model
        self._settings = settings
        self._adapters: OrderedDict[str, SamplerAdapter] = OrderedDict()
        self._last_used: dict[str, int] = {}
        #: Reads adapters, so that nobody waits for a disk who does not need it.
        self._reader = ThreadPoolExecutor(1, "tinkex-adapters")
        #: One at a time: whoever asked first has the next room.
        self._reading: _Reading | None = None
        #: Whether the last step found nothing to compute, and no request has come since.
        self._stands_still = False
        #: Requests whose adapter could not be loaded.
        self._refused: list[Finished] = []
        self._answers: dict[int, _Answer] = {}
        #: Streamed sequences with tokens that were not told yet, in the order they got them.
        self._grown: dict[SampleSequence, None] = {}
        count, kind = max(1, kv_tokens // PAGE_TOKENS), model.device.type
        most_idle = 0
        # Tokens found in the cache were computed in other company: equal up to rounding only.
        if settings.prefix_cache and not settings.deterministic:
            bytes_each = PAGE_TOKENS * model.cache_bytes_per_token
            most_idle = min(int(count * IDLE_SHARE[kind]), IDLE_BYTES[kind] // bytes_each)
        pages = Pages(count, PAGE_TOKENS, most_idle=most_idle)
        self._schedule = Schedule(
            pages,
            max_sequences=settings.max_sequences,
            max_batch_tokens=min(max_batch_tokens, FILL_TOKENS[kind]),
            fill_tokens=FILL_TOKENS_BETWEEN[kind],
            one_request_at_a_time=settings.deterministic,
            load_adapter=self._load_adapter,
            may_load=self._may_load,
        )
        self._checks = SampleChecks(
            Limits(vocab_size=model.vocab_size, max_context_length=model.max_context_length),
            pages=pages,
            eos_token_ids=model.eos_token_ids,
            folder=settings.folder,
        )
        # Never written before it is needed, so on a CPU the size is only a promise.
        rows = pages.count * pages.size
        self._layers = [
            CacheLayer(
                torch.empty(rows, *shape, dtype=model.dtype, device=model.device),
                torch.empty(rows, *shape, dtype=model.dtype, device=model.device),
            )
            for shape in model.cache_shapes
        ]

    @property
    def busy(self) -> bool:
        return self._schedule.busy

    @property
    def awaited_read(self) -> Future[SamplerAdapter] | None:
        """The read of an adapter without which nothing can be sampled; None if something can."""
        if self._reading is None or not self._stands_still or self._reading.adapter.done():
            return None
        return self._reading.adapter

    @property
    def schedule(self) -> Schedule:
        """To be read: how many wait, run, and hold pages."""
        return self._schedule

    def submit(
        self,
        ticket: int,
        wire: SampleRequest,
        adapter: Path | None,
        *,
        owner: str = "",
        streams: bool = False,
    ) -> None:
        """Checks the request and puts it in line; a `UserFailure` means that nothing happened."""
        key = None if adapter is None else str(adapter)
        request = self._checks.check(ticket, wire, key, owner, streams)
        self._answers[ticket] = _Answer(
            request=request, prompt=PromptAnswers(wire, request.prompt, request.questions)
        )
        self._schedule.add(request)
        self._stands_still = False

    def cancel(self, ticket: int) -> None:
        self._schedule.cancel(ticket)
        self._answers.pop(ticket, None)
        if self._reading and self._reading.key not in self._schedule.adapters_waited_for():
            self._reading.adapter.cancel()
            self._reading = None
        self._grown = {each: None for each in self._grown if each.request.ticket != ticket}

    def advance(self) -> list[Finished]:
        """A burst of steps for everybody; ends early when a request is answered. Waits for no disk."""
        finished: list[Finished] = []
        ends_s = time.perf_counter() + BURST_S
        for _ in range(BURST_STEPS):
            step = self._schedule.next_step()
            self._stands_still = step is None
            refused, self._refused = self._refused, []
            finished += refused
            if step is None:
                break
            try:
                with torch.inference_mode():
                    self._run(step)
            except Exception as error:
                # Whoever was in the step gets to know; everybody else goes on.
                log.exception("sampling step failed")
                finished += self._fail(tickets_of(step), error)
            finished += self._collect()
            if finished or time.perf_counter() > ends_s:
                break
        self._drop_idle_adapters()
        return finished

    def grown(self) -> list[Grown]:
        """The tokens of streamed requests that were not told yet, also of those just answered."""
        grown, self._grown = self._grown, {}
        told = []
        for sequence in grown:
            start, sequence.told = sequence.told, len(sequence.tokens)
            told.append(
                Grown(
                    ticket=sequence.request.ticket,
                    sequence=sequence.index,
                    start=start,
                    tokens=sequence.tokens[start:],
                    logprobs=sequence.logprobs[start:],
                )
            )
        return told

    # -- adapters ---------------------------------------------------------------------------------

    def _may_load(self, key: AdapterKey) -> bool:
        """Whether samples of an adapter may begin, or read it, although another may be on its way."""
        reading = self._reading
        if key is None or reading is None or key == reading.key:
            return True
        since_s = reading.waits_from_s
        overdue = since_s is not None and time.monotonic() - since_s > ROOM_WAIT_S
        return key in self._adapters and not overdue

    def _load_adapter(self, request: Request) -> bool:
        """Whether the adapter of a request that is next in line is in memory, now or already."""
        key = request.adapter
        if key is None:
            return True
        try:
            if key not in self._adapters and not self._bring_in(key):
                return False
        except Exception as error:  # noqa: BLE001  the outcome of this request, and of no other
            self._reading = None
            self._refused += self._fail({request.ticket}, error)
            return False
        self._adapters.move_to_end(key)
        self._last_used[key] = self._clock()
        return True

    def _bring_in(self, key: str) -> bool:
        """Whether an adapter that is not in memory came there; if not, ask again."""
        if self._reading is None:
            reading = self._reader.submit(read_sampler_adapter, self._model, Path(key))
            self._reading = _Reading(key=key, adapter=reading)
        if not self._reading.adapter.done():
            return False
        used = self._schedule.adapters_in_use()
        adapter = self._reading.adapter.result()
        # Samples that use the memory now end some time. Without any it is now or never.
        if used - {None} and self._must_wait(adapter.live.nbytes):
            if self._reading.waits_from_s is None:
                self._reading.waits_from_s = time.monotonic()
            return False
        self._make_room(adapter.live.nbytes, f"the adapter of {Path(key).name}")
        self._adapters[key] = adapter.to(self._model.device)
        self._reading = None
        return True

    def adapter_residents(self) -> list[Resident]:
        """The adapters as whoever plans the memory sees them."""
        used = self._schedule.adapters_in_use()
        return [
            Resident(
                name=key,
                size=adapter.live.nbytes,
                last_used=self._last_used[key],
                busy=key in used,
                has_file=True,
            )
            for key, adapter in self._adapters.items()
        ]

    def drop_adapter(self, name: str) -> None:
        del self._adapters[name], self._last_used[name]
        self._schedule.pages.forget(name)

    def _drop_idle_adapters(self) -> None:
        spare = len(self._adapters) - self._settings.idle_adapters
        if spare <= 0:
            return
        kept = self._schedule.adapters_in_use() | self._schedule.adapters_waited_for()
        for key in [key for key in self._adapters if key not in kept][:spare]:
            self.drop_adapter(key)

    def _routes(self, ranges: Sequence[tuple[int, int, AdapterKey]]) -> list[Route]:
        return [
            Route(start, stop, self._adapters[key].pairs)
            for start, stop, key in ranges
            if key is not None
        ]

    # -- steps ------------------------------------------------------------------------------------

    def _run(self, step: FillStep | DecodeStep) -> None:
        if isinstance(step, FillStep):
            self._fill(step)
        else:
            self._decode(step)

    def _fail(self, tickets: set[int], error: Exception) -> list[Finished]:
        for ticket in tickets:
            self.cancel(ticket)
        return [Finished(ticket=ticket, outcome=error) for ticket in sorted(tickets)]

    def _fill(self, step: FillStep) -> None:
        pieces = step.pieces
        device, pages = self._model.device, self._schedule.pages
        lengths = [piece.stop - piece.start for piece in pieces]
        rows = [rows_of(pages, piece) for piece in pieces]
        cache = CacheUse(
            layers=self._layers,
            write_T=torch.cat([r[p.start :] for r, p in zip(rows, pieces, strict=True)]).to(device),
            reaches=[
                Reach.of(r.to(device), p.stop - p.start) if p.start else None
                for r, p in zip(rows, pieces, strict=True)
            ],
        )
        packing = Packing.of(
            lengths, device=device, offsets=[piece.start for piece in pieces], cache=cache
        )
        ids = [token for piece in pieces for token in piece.fill.tokens[piece.start : piece.stop]]
        starts = packing.starts
        routes = self._routes(
            [
                (start, stop, piece.fill.request.adapter)
                for start, stop, piece in zip(starts, starts[1:], pieces, strict=False)
            ]
        )
        hidden_TH = self._model.hidden(torch.tensor(ids, device=device), packing, routes)
        begins: list[tuple[int, list[SampleSequence]]] = []
        for at, piece in enumerate(pieces):
            hidden = hidden_TH[starts[at] : starts[at + 1]]
            answer = self._answers[piece.fill.request.ticket]
            answer.found = max(answer.found, piece.fill.found or 0)
            if piece.fill.questions:
                self._answer_questions(piece, hidden)
            born, copies = self._schedule.filled(piece)
            self._copy(copies)
            if born:
                begins.append((starts[at + 1] - 1, born))
        if begins:
            self._begin(hidden_TH, begins)

    def _begin(self, hidden_TH: Tensor, begins: Sequence[tuple[int, list[SampleSequence]]]) -> None:
        """The next token of sequences that have all their known tokens in the cache."""
        routes = self._routes(groups(born[0] for _, born in begins))
        logits = self._model.head.logits(hidden_TH[[row for row, _ in begins]], routes)
        repeats = [at for at, (_, born) in enumerate(begins) for _ in born]
        self._draw([sequence for _, born in begins for sequence in born], logits[repeats])

    def _decode(self, step: DecodeStep) -> None:
        sequences = step.sequences
        device, pages = self._model.device, self._schedule.pages
        positions = [sequence.known - 1 for sequence in sequences]
        write = [
            pages.row(sequence.holding, position)
            for sequence, position in zip(sequences, positions, strict=True)
        ]
        levels = None
        if device.type == "cpu":
            runs = run_levels(pages, sequences)
            if not table_is_cheaper(runs, [sequence.known for sequence in sequences]):
                levels = as_levels(runs)
        cache = CacheUse(
            layers=self._layers,
            write_T=torch.tensor(write, device=device),
            levels=levels,
            table=None if levels else row_table(pages, sequences, self._model),
        )
        packing = Packing.of([1] * len(sequences), device=device, offsets=positions, cache=cache)
        routes = self._routes(groups(sequences))
        ids = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=device)
        hidden_SH = self._model.hidden(ids, packing, routes)
        self._draw(sequences, self._model.head.logits(hidden_SH, routes))

    def _draw(self, sequences: Sequence[SampleSequence], logits_SV: Tensor) -> None:
        draws = [Draw(s.request.drawing, s.index, len(s.tokens)) for s in sequences]
        picked = pick(logits_SV, draws)
        for at, sequence in enumerate(sequences):
            sequence.append(picked.tokens[at], picked.logprobs[at], picked.tops[at])
            if sequence.request.streams:
                self._grown[sequence] = None

    def _copy(self, copies: Sequence[CopyRows]) -> None:
        for source, target, length in copies:
            for layer in self._layers:
                for rows in layer:
                    rows[target : target + length] = rows[source : source + length]

    def _answer_questions(self, piece: Piece, hidden_tH: Tensor) -> None:
        request = piece.fill.request
        answers = self._answers[request.ticket].prompt
        rows = answers.needed(piece.start, piece.stop)
        if not len(rows):
            return
        asked = hidden_tH[torch.from_numpy(rows - piece.start).to(hidden_tH.device)]
        routes = self._routes([(0, len(asked), request.adapter)])
        for chunk in self._model.head.chunks(asked, routes):
            answers.take(rows[chunk.rows], chunk.logits_tV, request.drawing)

    # -- answers ----------------------------------------------------------------------------------

    def _collect(self) -> list[Finished]:
        finished = []
        for sequence in self._schedule.drop_finished():
            answer = self._answers[sequence.request.ticket]
            answer.sequences.append(sequence)
            if len(answer.sequences) == answer.request.samples:
                del self._answers[answer.request.ticket]
                finished.append(Finished(ticket=answer.request.ticket, outcome=response(answer)))
        return finished


def tickets_of(step: FillStep | DecodeStep) -> set[int]:
    if isinstance(step, FillStep):
        return {piece.fill.request.ticket for piece in step.pieces}
    return {sequence.request.ticket for sequence in step.sequences}


def response(answer: _Answer) -> SampleResponse:
    prompt = answer.prompt
    return SampleResponse(
        sequences=[
            sampled(sequence) for sequence in sorted(answer.sequences, key=lambda s: s.index)
        ],
        prompt_logprobs_np=prompt.logprobs,
        topk_prompt_logprobs_np=prompt.top,
        target_prompt_logprobs=prompt.targets,
        prompt_cache_hit_tokens=answer.found,
        prompt_alt_tokens=prompt.alternatives,
    )


def sampled(sequence: SampleSequence) -> SampledSequence:
    assert sequence.stop_reason is not None
    top = None
    if sequence.top:
        ids, logprobs = zip(*sequence.top, strict=True)
        top = TopkLogprobs(np.array(ids, np.int32), np.array(logprobs, np.float32))
    return SampledSequence(
        stop_reason=sequence.stop_reason,
        sequence_id="",
        tokens_np=np.array(sequence.tokens, np.int32),
        logprobs_np=np.array(sequence.logprobs, np.float32),
        topk_logprobs_np=top,
    )


def rows_of(pages: Pages, piece: Piece) -> Tensor:
    """The cache rows of a fill's tokens up to the end of the piece."""
    runs = pages.rows(piece.fill.holding, piece.stop)
    return torch.cat([torch.arange(start, stop) for start, stop in runs])


def as_levels(levels: Sequence[RunLevel]) -> list[Level]:
    return [
        Level([Run(*run) for run in level.runs], torch.tensor(level.rows) if depth else None)
        for depth, level in enumerate(levels)
    ]


def row_table(pages: Pages, sequences: Sequence[SampleSequence], model: BaseModel) -> Table:
    """What a decode step reads, as one rectangle."""
    longest = max(sequence.known for sequence in sequences)
    rows = np.zeros((len(sequences), longest), np.int64)
    bias = np.zeros((len(sequences), longest), np.float32)
    for at, sequence in enumerate(sequences):
        begin = 0
        for start, stop in pages.rows(sequence.holding, sequence.known):
            rows[at, begin : begin + stop - start] = np.arange(start, stop)
            begin += stop - start
        # Filling repeats a row that is written: what was never written may be NaN, and 0 * NaN is.
        rows[at, begin:] = rows[at, 0]
        bias[at, begin:] = -np.inf
    return Table(
        torch.from_numpy(rows.reshape(-1)).to(model.device),
        torch.from_numpy(bias[:, None, None, :]).to(model.device, model.dtype),
    )


# -- adapters -------------------------------------------------------------------------------------


def sampler_layout(model: BaseModel, saved: SavedAdapter, folder: Path) -> Layout:
    """Where the adapter's matrices will lie; refuses what does not fit the base model."""
    known = {target.name: target for target in model.targets}
    if extra := saved.pairs.keys() - known.keys():
        raise UserFailure(
            f"{folder.name}: does not fit the base model: {describe_difference(set(), extra)}."
        )
    for name, (A, B) in saved.pairs.items():
        if (A.shape[1], B.shape[0]) != (known[name].inputs, known[name].outputs):
            raise UserFailure(
                f"{folder.name}: {name} maps {A.shape[1]} to {B.shape[0]} features, and in this "
                f"base model {known[name].inputs} to {known[name].outputs}."
            )
    return make_layout([known[name] for name in known if name in saved.pairs], saved.rank)


def read_sampler_adapter(model: BaseModel, folder: Path) -> SamplerAdapter:
    """An adapter for sampling, still in the host's memory."""
    saved = checkpoints.read_adapter(folder)
    layout = sampler_layout(model, saved, folder)
    live = torch.zeros(layout.size, dtype=model.dtype)
    checkpoints.fill(live, layout, saved.pairs)
    return SamplerAdapter(layout=layout, scale=saved.scale, live=live)

"""The sampler: continuous batching over one KV cache, for the base model and many adapters."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.adapters import checkpoints
from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.adapters.memory_plan import Resident
from tinkex.engine.device import SAMPLING_PROFILES, release_cached
from tinkex.engine.input_checks import NONE_PREPARED, PreparedImages, limits_of
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.targets import make_layout
from tinkex.engine.ranks.process_group import agreed
from tinkex.engine.sampling.interface import Finished, PartialOutput, SamplerStats
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.model_runner import ModelRunner
from tinkex.engine.sampling.prompt_logprobs import PromptLogprobResults
from tinkex.engine.sampling.sample_checks import SampleChecks
from tinkex.engine.sampling.scheduler import (
    DecodeStep,
    PrefillChunk,
    PrefillStep,
    Scheduler,
    adapter_ranges,
)
from tinkex.engine.sampling.sequences import (
    AdapterKey,
    Request,
    SampleSequence,
)
from tinkex.engine.sampling.state_slots import StateSlots
from tinkex.engine.sampling.token_sampling import SampleStep, sample_tokens
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.sampling import (
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TopkLogprobs,
)

log = logging.getLogger(__name__)

# T packed tokens, H hidden size

#: A burst is a series of steps without an interruption. Limits of one burst: the number of steps,
#: and the seconds after which no further step starts.
BURST_STEPS = 8
BURST_S = 0.25

#: While a request waits for memory for its adapter, requests for loaded adapters are admitted for
#: this many seconds. Then they wait too, or a steady stream of them would block it forever.
MAX_ROOM_WAIT_S = 30.0


#: After a step that did not fit in memory, steps are smaller for this many seconds.
SMALL_STEPS_S = 30.0


@dataclass(kw_only=True)
class _PendingResponse:
    """A request and its results so far."""

    request: Request
    sequences: list[SampleSequence] = field(default_factory=list)
    prompt: PromptLogprobResults
    #: Prompt tokens found in the prefix cache.
    cached_tokens: int = 0


@dataclass(kw_only=True)
class _AdapterLoad:
    """An adapter that is being read from its folder, or was read and waits for memory."""

    key: str
    future: Future[SamplerAdapter]
    #: When it started to wait for memory.
    waiting_since_s: float | None = None


class BatchingSampler:
    """See `interface.Sampler`."""

    def __init__(
        self,
        model: BaseModel,
        settings: EngineSettings,
        *,
        max_batch_tokens: int,
        idle_bytes: int,
        kv_tokens: int,
        states: int,
        must_wait: Callable[[int], bool],
        make_room: Callable[[int, str], None],
        explain_full: Callable[[Exception], Exception],
        clock: Callable[[], int],
    ) -> None:
        #: Whether an adapter of this size fits only after adapters in use become idle.
        self._must_wait = must_wait
        #: Called with size and description before an adapter is loaded; may raise `UserFailure`.
        self._make_room = make_room
        #: The failure of a request that does not fit in memory alone.
        self._explain_full = explain_full
        #: When steps were last made smaller; None if they have their usual size.
        self._shrunk_s: float | None = None
        #: Counts uses of adapters, together with those in training.
        self._clock = clock
        self._model = model
        #: With several ranks, rank 0 samples and decides; the others follow.
        self._group = None if model.shard is None else model.shard.group
        self._settings = settings
        #: Maximum memory of adapters that no request uses.
        self._idle_bytes = idle_bytes
        self._adapters: OrderedDict[str, SamplerAdapter] = OrderedDict()
        self._last_used: dict[str, int] = {}
        #: Reads adapters in the background, so that other requests need not wait for the disk.
        self._reader = ThreadPoolExecutor(1, "tinkex-adapters")
        #: One load at a time, so that adapters get memory in the order of their requests.
        self._loading: _AdapterLoad | None = None
        #: Whether the last step found nothing to compute and no request has arrived since.
        self._stalled = False
        #: Tokens computed since the start.
        self.tokens_prefilled = self.tokens_sampled = 0
        #: Requests that failed by themselves: their adapter could not be loaded, or their grammar
        #: could not be followed.
        self._failed: list[Finished] = []
        self._pending: dict[int, _PendingResponse] = {}
        #: Streamed sequences with unreported tokens, in the order in which they were sampled.
        self._partial: dict[SampleSequence, None] = {}
        profile = SAMPLING_PROFILES[model.device.type]
        count = max(1, kv_tokens // profile.page_tokens)
        max_idle = 0
        # Cached tokens were computed in another batch and are equal only up to rounding.
        if settings.prefix_cache and not settings.deterministic:
            bytes_each = profile.page_tokens * model.cache_bytes_per_token
            max_idle = min(
                int(count * profile.max_idle_fraction), profile.max_idle_bytes // bytes_each
            )
        pages = Pages(
            count,
            profile.page_tokens,
            max_idle=max_idle,
            states=StateSlots(states) if model.state_shapes else None,
        )
        self._scheduler = Scheduler(
            pages,
            max_sequences=settings.max_sequences,
            max_batch_tokens=min(max_batch_tokens, profile.max_prefill_tokens),
            prefill_tokens=profile.max_prefill_tokens_while_decoding,
            one_request_at_a_time=settings.deterministic,
            load_adapter=self._load_adapter,
            may_load=self._may_load,
        )
        self._checks = SampleChecks(
            limits_of(model),
            pages=pages,
            eos_token_ids=model.eos_token_ids,
            folder=settings.folder,
        )
        self._runner = ModelRunner(
            model,
            pages,
            self._adapters,
            max_sequences=settings.max_sequences,
        )

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    @property
    def awaited_read(self) -> Future[SamplerAdapter] | None:
        """The adapter read that all requests wait for; None if some request can proceed."""
        if self._loading is None or not self._stalled or self._loading.future.done():
            return None
        return self._loading.future

    @property
    def scheduler(self) -> Scheduler:
        """For tests and benchmarks."""
        return self._scheduler

    def stats(self) -> SamplerStats:
        scheduler, pages = self._scheduler, self._scheduler.pages
        return SamplerStats(
            samples_waiting=scheduler.waiting,
            samples_running=scheduler.running_requests,
            sequences_running=scheduler.running,
            kv_pages=pages.count,
            kv_pages_used=pages.count - pages.available,
            kv_pages_known=pages.idle,
            tokens_prefilled=self.tokens_prefilled,
            tokens_sampled=self.tokens_sampled,
        )

    def submit(
        self,
        ticket: int,
        sample_request: SampleRequest,
        adapter: Path | None,
        *,
        owner: str = "",
        streams: bool = False,
        images: PreparedImages = NONE_PREPARED,
    ) -> None:
        """Checks and queues a request. If it raises `UserFailure`, nothing has changed."""
        key = None if adapter is None else str(adapter)
        request = self._checks.check(ticket, sample_request, key, owner, streams, images)
        self._pending[ticket] = _PendingResponse(
            request=request,
            prompt=PromptLogprobResults(sample_request, request),
        )
        self._scheduler.add(request)
        self._stalled = False

    def cancel(self, ticket: int) -> None:
        self._scheduler.cancel(ticket)
        self._pending.pop(ticket, None)
        if self._loading and self._loading.key not in self._scheduler.adapters_awaited():
            self._loading.future.cancel()
            self._loading = None
        self._partial = {each: None for each in self._partial if each.request.ticket != ticket}

    def advance(self) -> list[Finished]:
        """Runs a burst of steps; ends early when a request finishes. Never waits for the disk."""
        finished: list[Finished] = []
        if self._shrunk_s is not None and time.monotonic() - self._shrunk_s > SMALL_STEPS_S:
            self._shrunk_s = time.monotonic() if self._scheduler.grow_steps() else None
        ends_s = time.perf_counter() + BURST_S
        for _ in range(BURST_STEPS):
            step = self._scheduler.next_step(decode_steps=self._runner.decode_steps)
            self._stalled = step is None
            finished += self._take_failed()
            if step is None:
                break
            try:
                with torch.inference_mode():
                    self._run(step)
            except Exception as error:
                if self._group is not None:
                    raise  # the other ranks are in the middle of this step
                if isinstance(error, torch.OutOfMemoryError):
                    finished += self._continue_smaller(step, error)
                else:
                    # Fail the requests in this step; the others continue.
                    log.exception("sampling step failed")
                    finished += self._fail(tickets_of(step), error)
            finished += self._collect() + self._take_failed()
            if finished or self._is_past(ends_s):
                break
        self._drop_idle_adapters()
        return finished

    def _is_past(self, time_s: float) -> bool:
        return agreed(self._group, lambda: time.perf_counter() > time_s)

    def partial_outputs(self) -> list[PartialOutput]:
        """Unreported tokens of streamed requests, including requests that have just finished."""
        changed, self._partial = self._partial, {}
        outputs = []
        for sequence in changed:
            start, sequence.reported = sequence.reported, len(sequence.tokens)
            outputs.append(
                PartialOutput(
                    ticket=sequence.request.ticket,
                    sequence=sequence.index,
                    start=start,
                    tokens=sequence.tokens[start:],
                    logprobs=sequence.logprobs[start:],
                    top=sequence.top[start:],
                )
            )
        return outputs

    # -- adapters ---------------------------------------------------------------------------------

    def _may_load(self, key: AdapterKey) -> bool:
        """Whether a request for this adapter may be admitted while another is being loaded."""
        loading = self._loading
        if key is None or loading is None or key == loading.key:
            return True
        since_s = loading.waiting_since_s
        overdue = since_s is not None and agreed(
            self._group, lambda: time.monotonic() - since_s > MAX_ROOM_WAIT_S
        )
        return key in self._adapters and not overdue

    def _load_adapter(self, request: Request) -> bool:
        """Loads the adapter of the next request. Returns whether it is in memory."""
        key = request.adapter
        if key is None:
            return True
        try:
            if key not in self._adapters and not self._load(key):
                return False
        except Exception as error:  # noqa: BLE001  the outcome of this request only
            self._loading = None
            self._failed += self._fail({request.ticket}, error)
            return False
        self._adapters.move_to_end(key)
        self._last_used[key] = self._clock()
        return True

    def _load(self, key: str) -> bool:
        """Starts or finishes loading an adapter. Returns False if it is not in memory yet."""
        if self._loading is None:
            reading = self._reader.submit(read_sampler_adapter, self._model, Path(key))
            self._loading = _AdapterLoad(key=key, future=reading)
        reading = self._loading.future
        if not agreed(self._group, reading.done):
            return False
        if self._group is not None:
            self._group.same_outcome(reading.exception() is not None)
        used = self._scheduler.adapters_in_use()
        adapter = self._loading.future.result()
        # If adapters are in use, wait for them to become idle. Otherwise load now or fail.
        if used - {None} and self._must_wait(adapter.live.nbytes):
            if self._loading.waiting_since_s is None:
                self._loading.waiting_since_s = time.monotonic()
            return False
        self._make_room(adapter.live.nbytes, f"the adapter of {Path(key).name}")
        self._adapters[key] = adapter.to(self._model.device)
        self._loading = None
        return True

    def adapter_residents(self) -> list[Resident]:
        """The adapters in memory, for the adapter store."""
        used = self._scheduler.adapters_in_use()
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
        self._scheduler.pages.evict(name)

    def _drop_idle_adapters(self) -> None:
        """Drops adapters while they are too many, or those that are idle take too much memory."""
        if not self._adapters:
            return
        kept = self._scheduler.adapters_in_use() | self._scheduler.adapters_awaited()
        idle = [key for key in self._adapters if key not in kept]
        size = sum(self._adapters[key].live.nbytes for key in idle)
        for key in idle:
            if len(self._adapters) <= self._settings.idle_adapters and size <= self._idle_bytes:
                break
            size -= self._adapters[key].live.nbytes
            self.drop_adapter(key)

    # -- steps ------------------------------------------------------------------------------------

    def _run(self, step: PrefillStep | DecodeStep) -> None:
        self._runner.copy_states(self._scheduler.take_state_copies())
        if isinstance(step, PrefillStep):
            self._prefill(step)
        else:
            self._decode(step)

    def _fail(self, tickets: set[int], error: Exception) -> list[Finished]:
        for ticket in tickets:
            self.cancel(ticket)
        return [Finished(ticket=ticket, outcome=error) for ticket in sorted(tickets)]

    def _take_failed(self) -> list[Finished]:
        """Requests that failed by themselves, apart from the others of their step."""
        failed, self._failed = self._failed, []
        return failed

    def _continue_smaller(
        self, step: PrefillStep | DecodeStep, error: torch.OutOfMemoryError
    ) -> list[Finished]:
        """
        After a step that did not fit in memory: everything is queued again, for smaller steps.

        Fails a request that does not fit alone. No result changes: preempted sequences keep their
        tokens. In deterministic mode other steps would change bits, so the requests fail.
        """
        tickets = tickets_of(step)
        if self._settings.deterministic:
            return self._fail(tickets, error)
        log.warning("a sampling step does not fit in memory: %s", error)
        self._scheduler.preempt_all()
        release_cached(self._model.device)
        self._shrunk_s = time.monotonic()
        if self._scheduler.shrink_steps():
            return []
        return self._fail(tickets, self._explain_full(error))

    def _prefill(self, step: PrefillStep) -> None:
        chunks = step.chunks
        hidden_TH, starts = self._runner.prefill(chunks)
        self.tokens_prefilled += starts[-1]
        ready: list[tuple[int, list[SampleSequence]]] = []
        for at, chunk in enumerate(chunks):
            hidden = hidden_TH[starts[at] : starts[at + 1]]
            pending = self._pending[chunk.prefill.request.ticket]
            pending.cached_tokens = max(pending.cached_tokens, chunk.prefill.cached_tokens or 0)
            if chunk.prefill.prompt_logprobs:
                self._score_prompt(chunk, hidden)
            started, copies = self._scheduler.finish_chunk(chunk)
            self._runner.copy_slots(copies)
            if started:
                ready.append((starts[at + 1] - 1, started))
        if ready:
            self._sample_first_tokens(hidden_TH, ready)

    def _sample_first_tokens(
        self, hidden_TH: Tensor, ready: Sequence[tuple[int, list[SampleSequence]]]
    ) -> None:
        """Samples the first token of sequences whose prefill is complete."""
        most = self._model.head.chunk_tokens
        for begin in range(0, len(ready), most):
            some = ready[begin : begin + most]
            segments = self._runner.adapter_segments(
                adapter_ranges(started[0] for _, started in some)
            )
            logits = self._model.head.logits(hidden_TH[[at for at, _ in some]], segments)
            rows = [(at, each) for at, (_, started) in enumerate(some) for each in started]
            for first in range(0, len(rows), most):
                part = rows[first : first + most]
                self._sample([sequence for _, sequence in part], logits[[at for at, _ in part]])

    def _sample_all(self, sequences: Sequence[SampleSequence], hidden_SH: Tensor) -> None:
        """Samples the next token of each sequence, from not too many logits at once."""
        most = self._model.head.chunk_tokens
        for begin in range(0, len(sequences), most):
            some = sequences[begin : begin + most]
            segments = self._runner.adapter_segments(adapter_ranges(some))
            logits = self._model.head.logits(hidden_SH[begin : begin + most], segments)
            self._sample(some, logits)

    def _decode(self, step: DecodeStep) -> None:
        sequences = step.sequences
        burst = self._runner.start_burst(sequences, step.steps)
        if burst is None:
            self._sample_all(sequences, self._runner.decode(sequences))
            return
        by_host = [at for at, s in enumerate(sequences) if s.request.sampling.needs_host]
        if by_host:
            self._sample([sequences[at] for at in by_host], burst.logits_SV[by_host])
        decoded = burst.read()
        rows = zip(sequences, decoded.tokens.T.tolist(), decoded.logprobs.T.tolist(), strict=True)
        for sequence, tokens, logprobs in rows:
            request = sequence.request
            if request.sampling.needs_host:
                continue
            self.tokens_sampled += sequence.extend(tokens, logprobs)
            if request.streams:
                self._partial[sequence] = None

    def _sample(self, sequences: Sequence[SampleSequence], logits_SV: Tensor) -> None:
        steps = [
            SampleStep(s.request.sampling, s.index, len(s.tokens), s.tokens, s.guide)
            for s in sequences
        ]
        sampled = agreed(self._group, lambda: sample_tokens(logits_SV, steps))
        self.tokens_sampled += len(sequences)
        for at, sequence in enumerate(sequences):
            sequence.append(sampled.tokens[at], sampled.logprobs[at], sampled.tops[at])
            if sequence.request.streams:
                self._partial[sequence] = None
        failed = {}
        if any(sequence.guide is not None for sequence in sequences):
            failed = agreed(self._group, lambda: failed_guides(sequences))
        for ticket, error in failed.items():
            self._failed += self._fail({ticket}, error)

    def _score_prompt(self, chunk: PrefillChunk, hidden_tH: Tensor) -> None:
        request = chunk.prefill.request
        results = self._pending[request.ticket].prompt
        sources = results.needed_sources(chunk.start, chunk.stop)
        if not len(sources):
            return
        needed_tH = hidden_tH[torch.from_numpy(sources - chunk.start).to(hidden_tH.device)]
        segments = self._runner.adapter_segments([(0, len(needed_tH), request.adapter)])
        for part in self._model.head.chunks(needed_tH, segments):
            span, logits_tV = part.span, self._model.head.whole(part.logits_tV)
            if self._group is None or not self._group.rank:
                results.add_logits(sources[span], logits_tV, request.sampling)

    # -- results ----------------------------------------------------------------------------------

    def _collect(self) -> list[Finished]:
        finished = []
        for sequence in self._scheduler.drop_finished():
            pending = self._pending[sequence.request.ticket]
            pending.sequences.append(sequence)
            if len(pending.sequences) == pending.request.samples:
                del self._pending[pending.request.ticket]
                finished.append(
                    Finished(ticket=pending.request.ticket, outcome=to_response(pending))
                )
        return finished


def failed_guides(sequences: Iterable[SampleSequence]) -> dict[int, Exception]:
    """The tickets whose grammar could not be followed, with the reason."""
    return {
        sequence.request.ticket: error
        for sequence in sequences
        if sequence.guide is not None and (error := sequence.guide.error) is not None
    }


def tickets_of(step: PrefillStep | DecodeStep) -> set[int]:
    if isinstance(step, PrefillStep):
        return {chunk.prefill.request.ticket for chunk in step.chunks}
    return {sequence.request.ticket for sequence in step.sequences}


def to_response(pending: _PendingResponse) -> SampleResponse:
    prompt = pending.prompt
    return SampleResponse(
        sequences=[
            to_sampled_sequence(sequence)
            for sequence in sorted(pending.sequences, key=lambda s: s.index)
        ],
        prompt_logprobs_np=prompt.logprobs,
        topk_prompt_logprobs_np=prompt.top,
        target_prompt_logprobs=prompt.targets,
        prompt_cache_hit_tokens=pending.cached_tokens,
        prompt_alt_tokens=prompt.alternatives,
    )


def to_sampled_sequence(sequence: SampleSequence) -> SampledSequence:
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


# -- adapters -------------------------------------------------------------------------------------


def read_sampler_adapter(model: BaseModel, folder: Path) -> SamplerAdapter:
    """Reads an adapter for sampling into host memory."""
    saved = checkpoints.read_adapter(folder, [target.name for target in model.targets])
    targets, shard = model.targets, model.shard
    layout = checkpoints.fitted_layout(
        targets if shard is None else shard.whole_targets(targets), saved, folder
    )
    if shard is not None:
        layout = make_layout([each for each in targets if each.name in saved.pairs], saved.rank)
    live = torch.zeros(layout.size, dtype=model.dtype)
    checkpoints.copy_pairs(live, layout, saved.pairs, shard)
    return SamplerAdapter(layout=layout, scale=saved.scale, live=live)

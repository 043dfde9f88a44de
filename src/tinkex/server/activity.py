"""
The activity line in the log: what the server does, at intervals while it is busy, and once when idle.

    training 2 runs, 98 tok/s; sampling 6 sequences, 40 tok/s; queue 3; KV cache 12 %; ...
    idle: 1,204 tokens trained, 300 sampled in the last 3 minutes

The numbers are those of the engines and of the scheduler. While the server is idle, the task waits
for the next request.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from tinkex.server.executor import Executor
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.wire.proto.frames_pb2 import Stats
from tinkex.wire.text_format import format_bytes

log = logging.getLogger("tinkex.server.activity")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """The state of all engines at one time. Token counts only grow."""

    at_s: float
    tokens_trained: int = 0
    tokens_prefilled: int = 0
    tokens_sampled: int = 0
    #: Training runs that had a step since the look before, if their session is still open.
    runs: int = 0
    #: Sequences being sampled.
    sequences: int = 0
    #: Accepted requests that are not finished.
    unfinished: int = 0
    #: Those of them that no engine has yet, and samples that wait in an engine.
    queue: int = 0
    kv_pages: int = 0
    kv_pages_used: int = 0
    adapter_bytes: int = 0
    adapter_budget_bytes: int = 0
    #: Why an engine makes no progress.
    waiting_for: str | None = None

    @property
    def tokens(self) -> int:
        return self.tokens_trained + self.tokens_prefilled + self.tokens_sampled


def busy_line(before: Activity, now: Activity) -> str:
    """What happened between two looks."""
    seconds = max(now.at_s - before.at_s, 1e-3)
    trained = now.tokens_trained - before.tokens_trained
    prefilled = now.tokens_prefilled - before.tokens_prefilled
    sampled = now.tokens_sampled - before.tokens_sampled
    parts = []
    if now.runs or trained:
        # A model that is rebuilt repeats its steps, and is no run that trains.
        training = f"{_count(now.runs, 'run')}, " if now.runs else ""
        parts.append(f"training {training}{_rate(trained, seconds)}")
    if now.sequences or sampled or prefilled:
        # Between two samples there may be no sequence.
        now_running = f"{_count(now.sequences, 'sequence')}, " if now.sequences else ""
        sampling = f"sampling {now_running}{_rate(sampled, seconds)}"
        parts.append(sampling + (f", prompts {_rate(prefilled, seconds)}" if prefilled else ""))
    parts.append(f"queue {now.queue:,}")
    if now.kv_pages:
        parts.append(f"KV cache {100 * now.kv_pages_used / now.kv_pages:.0f} %")
    if now.adapter_budget_bytes:
        budget = format_bytes(now.adapter_budget_bytes)
        parts.append(f"adapters {format_bytes(now.adapter_bytes)} of {budget}")
    if now.waiting_for is not None:
        parts.append(now.waiting_for)
    return "; ".join(parts)


def idle_line(first: Activity, last: Activity) -> str:
    """What happened since the server was idle last; `last` is the last look with progress."""
    trained = last.tokens_trained - first.tokens_trained
    sampled = last.tokens_sampled - first.tokens_sampled
    return (
        f"idle: {trained:,} tokens trained, {sampled:,} sampled in the last "
        f"{_duration(last.at_s - first.at_s)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _rate(tokens: int, seconds: float) -> str:
    rate = tokens / seconds
    return f"{rate:.1f} tok/s" if 0 < rate < 10 else f"{rate:,.0f} tok/s"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return _count(round(seconds), "second")
    if seconds < 90 * 60:
        return _count(round(seconds / 60), "minute")
    return f"{seconds / 3600:.1f} hours"


class ActivityLog:
    """Logs the lines. Belongs to one event loop; 0 as the interval logs nothing."""

    def __init__(self, executor: Executor, scheduler: Scheduler, *, every_s: float) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._every_s = every_s
        self._stats: dict[str, Stats] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._every_s > 0:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._scheduler.busy.wait()
            await self._log_until_idle()

    async def _log_until_idle(self) -> None:
        """Log until a whole interval had no unfinished request and no progress."""
        first = last = before = self._look(time.monotonic())
        while True:
            await asyncio.sleep(self._every_s)
            now = self._look(before.at_s)
            if now.tokens > before.tokens:
                last = now
            elif not now.unfinished:
                break
            log.info("%s", busy_line(before, now))
            before = now
        if last.tokens > first.tokens:
            log.info("%s", idle_line(first, last))

    def _look(self, since_s: float) -> Activity:
        served = self._executor.served
        names = [engine for model in served for engine in model.engines]
        for name in names:
            # While an engine restarts, its last numbers count.
            if (stats := self._executor.stats(name)) is not None:
                self._stats[name] = stats
        all_stats = self._stats.values()
        current = [stats for name in names if (stats := self._executor.stats(name)) is not None]
        wanted = self._scheduler.base_models()
        training = sum(one.models_training for one in current)
        # An engine without requests may be unloaded; nobody waits for it.
        reasons = (
            self._executor.waiting_for(engine)
            for model in served
            if model.name in wanted
            for engine in model.engines
        )
        return Activity(
            at_s=time.monotonic(),
            tokens_trained=sum(one.tokens_trained for one in all_stats),
            tokens_prefilled=sum(one.tokens_prefilled for one in all_stats),
            tokens_sampled=sum(one.tokens_sampled for one in all_stats),
            runs=max(self._scheduler.runs_with_steps(since_s), training),
            sequences=sum(one.sequences_running for one in current),
            unfinished=self._scheduler.unfinished,
            queue=self._scheduler.waiting + sum(one.samples_waiting for one in current),
            kv_pages=sum(one.kv_pages for one in current),
            kv_pages_used=sum(one.kv_pages_used for one in current),
            adapter_bytes=sum(
                one.adapters_resident_bytes + one.sampler_adapters_bytes for one in current
            ),
            adapter_budget_bytes=sum(one.adapter_budget_bytes for one in current),
            waiting_for=next((reason for reason in reasons if reason is not None), None),
        )

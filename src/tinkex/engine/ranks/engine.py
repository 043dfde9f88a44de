"""Rank 0 of an engine of several ranks: makes each call of `Engine` on all of them.

The worker loop runs on rank 0 only and sees an `Engine`. Rank 0 decides: what runs next, clocks,
free memory, randomness, the ends of bursts. The other ranks make the same calls (`follower`).

If a rank dies, does not answer, or fails in a call in which another one does not, the engine ends,
in the way in which the rank has ended: the server starts another one and rebuilds its models.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

import numpy as np

from tinkex.engine.device import choose_device, is_device_lost, is_out_of_memory
from tinkex.engine.engine import Engine
from tinkex.engine.input_checks import PreparedImages
from tinkex.engine.ranks.channel import Channel
from tinkex.engine.ranks.process_group import ProcessGroup
from tinkex.engine.ranks.rank_settings import settings_of_rank
from tinkex.engine.request_images import NamedInput, inputs_of
from tinkex.engine.training.passes import Pass
from tinkex.wire.engine_protocol import DEVICE_LOST_STATUS, RANK_LOST_STATUS
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.sampling import SampleRequest
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardOutput

log = logging.getLogger("tinkex.engine.ranks")

T = TypeVar("T")

#: Calls of `Engine` that all ranks make. Other attributes are those of rank 0.
ON_ALL_RANKS = frozenset(
    {
        *("create", "drop", "optim_step", "clear_gradients", "register_loss", "drop_loss"),
        *("save", "load", "snapshot_files", "snapshot_bytes", "restore", "cancel", "advance"),
    }
)

#: Instead of those of an image.
NO_PATCHES = np.zeros((0, 0), np.float32)

#: Of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: How long the other ranks may go on after one has failed. If the failure is that of the request,
#: all fail at the same place.
GRACE_S = 30.0

#: How long the end of a dead rank is waited for.
EXIT_S = 5.0


class Started(Protocol):
    """The process of another rank."""

    def wait(self, timeout: float | None = None) -> int | None: ...

    def kill(self) -> None: ...


#: Starts a rank with its end of the socket. The descriptor is one that it keeps open.
Start = Callable[[EngineSettings, int, socket.socket, int | None], Started]


def start_process(
    settings: EngineSettings, rank: int, control: socket.socket, keeps: int | None
) -> Started:
    command = [sys.executable, "-m", "tinkex.engine", "--fd", str(control.fileno())]
    command += ["--rank", str(rank), "--settings", settings.to_json()]
    kept = () if keeps is None else (keeps,)
    return subprocess.Popen(command, pass_fds=(control.fileno(), *kept), stdin=subprocess.DEVNULL)


class Outcome(tuple[str, str, str]):
    """How a call ended on a rank: the type of its error (empty: none), its message and its hint."""

    @classmethod
    def of(cls, error: Exception | None) -> Outcome:
        if error is None:
            return cls(("", "", ""))
        return cls((type(error).__name__, str(error), getattr(error, "hint", "")))

    @property
    def failed(self) -> bool:
        return bool(self[0])

    def __str__(self) -> str:
        return f"{self[0]}: {self[1]}" if self.failed else "no error"


class RefusedByRank(ValueError):
    """Another rank cannot load its part of the model."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def refusal(rank: int, outcome: Outcome) -> RefusedByRank:
    return RefusedByRank(f"rank {rank}: {outcome[1]}", hint=outcome[2])


def without_patches(images: PreparedImages) -> PreparedImages:
    """For the other ranks, which get the patches when they compute them."""
    return {key: replace(image, patches=NO_PATCHES) for key, image in images.items()}


class _Rank:
    """Another rank, as rank 0 sees it."""

    def __init__(self, number: int, process: Started, channel: Channel) -> None:
        self.number, self.process, self.channel = number, process, channel
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()


class RankedEngine:
    """An `Engine` over several ranks, of which this process is rank 0."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        start: Start = start_process,
        keeps: int | None = None,
        on_end: Callable[[str, int], NoReturn] | None = None,
        on_refusal: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """
        Starts the other ranks and loads the model. `keeps` is a descriptor that they keep open.

        `on_end` ends this process with a reason and the status of the rank that has ended.
        `on_refusal` is called before that if a rank cannot load its part while others wait for it.
        """
        self._on_refusal = on_refusal
        self._on_end = on_end or end_like
        self._timeout_s = settings.rank_timeout_s
        self._closing = False
        self._lock = threading.Lock()
        #: The call that runs now.
        self._calls = 0
        self._running = True
        self._numbers: weakref.WeakKeyDictionary[Pass, int] = weakref.WeakKeyDictionary()
        self._passes = 0
        self._dropped: list[int] = []
        own = settings_of_rank(settings, 0)
        self._ranks = [
            self._start(settings, rank, start, keeps) for rank in range(1, settings.ranks)
        ]
        for rank in self._ranks:
            rank.channel.start()
        folder = Path(tempfile.mkdtemp(prefix="tinkex-ranks-"))
        try:
            self.tell_all("join", str(folder / "store"))
            group = ProcessGroup(
                rank=0,
                size=settings.ranks,
                device=choose_device(own),
                rendezvous=folder / "store",
                decisions=self,
                timeout_s=self._timeout_s,
                on_loss=lambda reason: self._end(reason, RANK_LOST_STATUS),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._group = group
        try:
            self._engine = Engine(own, group=group)
        except Exception:
            self.close()  # what it refuses, another rank may wait for
            raise
        self._finished(lambda: None, "load the model")
        devices = (settings_of_rank(settings, rank).device for rank in range(settings.ranks))
        self._engine.facts.device = ", ".join(dict.fromkeys(devices))

    def _start(
        self, settings: EngineSettings, number: int, start: Start, keeps: int | None
    ) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start(settings, number, theirs, keeps)
        channel = Channel(
            ours,
            on_message=lambda outcome: self._hear_outcome(rank, outcome),
            on_end=lambda: self._lose(rank),
        )
        rank = _Rank(number, process, channel)
        return rank

    # -- calls ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in ON_ALL_RANKS:
            return lambda *args, **kwargs: self._call(name, *args, **kwargs)
        return getattr(self._engine, name)

    def submit(
        self,
        ticket: int,
        request: SampleRequest,
        *,
        images: PreparedImages | None = None,
        **options: Any,
    ) -> None:
        images = self._engine.prepared([NamedInput("prompt", request.prompt)], images)
        params = request.sampling_params
        if params.seed is None:
            drawn = params.model_copy(update={"seed": secrets.randbits(63)})
            request = request.model_copy(update={"sampling_params": drawn})
        self._call(
            "submit",
            *(ticket, request),
            images=images,
            **options,
            _sent=((ticket, request), {**options, "images": without_patches(images)}),
        )

    def begin_pass(
        self,
        model_id: str,
        work: ForwardBackwardInput,
        *,
        backward: bool,
        images: PreparedImages | None = None,
    ) -> Pass:
        images = self._engine.prepared(inputs_of(work), images)
        number = self._passes = self._passes + 1
        begun: Pass = self._call(
            "begin_pass",
            *(model_id, work),
            backward=backward,
            images=images,
            _sent=((number, model_id, work, backward, without_patches(images)), {}),
        )
        self._numbers[begun] = number
        weakref.finalize(begun, self._dropped.append, number)
        return begun

    def run_micro_batch(self, slices: Sequence[tuple[Pass, int]]) -> None:
        dropped, self._dropped[:] = [*self._dropped], []
        numbered = [(self._numbers[each], count) for each, count in slices]
        self._call("run_micro_batch", slices, _sent=((numbered, dropped), {}))

    def run_pass(
        self, model_id: str, work: ForwardBackwardInput, *, backward: bool
    ) -> ForwardBackwardOutput:
        return Engine.run_pass(cast(Engine, self), model_id, work, backward=backward)

    def _call(self, name: str, *args: Any, _sent: Arguments | None = None, **kwargs: Any) -> Any:
        """Makes a call on all ranks. `_sent` are the arguments of the others, if they differ."""
        self._calls += 1
        self._running = True
        self.tell_all("call", (name, *(_sent or (args, kwargs))))
        return self._finished(lambda: getattr(self._engine, name)(*args, **kwargs), name)

    def _finished(self, run: Callable[[], T], what: str) -> T:
        """Runs a call on this rank, and waits for the others."""
        error, result = None, None
        try:
            result = run()
        except Exception as raised:
            if is_device_lost(raised) or is_out_of_memory(raised):
                log.error("rank 0 cannot use its device any longer", exc_info=raised)
                self._end(f"rank 0 failed in `{what}`: {raised}", DEVICE_LOST_STATUS)
            error = raised
        own = Outcome.of(error)
        for rank in self._ranks:
            outcome = self._outcome_of(rank, own, what)
            if outcome[0] != own[0]:
                self._differ(rank, outcome, own, what)
        self._running = False
        if error is not None:
            raise error
        return cast(T, result)

    def _outcome_of(self, rank: _Rank, own: Outcome, what: str) -> Outcome:
        limit_s = min(GRACE_S, self._timeout_s) if own.failed else self._timeout_s
        try:
            return rank.outcomes.get(timeout=limit_s)
        except queue.Empty:
            self._end(
                f"rank {rank.number} has not ended `{what}` {limit_s:g} s after rank 0 ({own})",
                RANK_LOST_STATUS,
            )

    def _differ(self, rank: _Rank, outcome: Outcome, own: Outcome, what: str) -> None:
        text = f"`{what}` ended differently: rank {rank.number}: {outcome}; rank 0: {own}"
        if not self._calls and outcome.failed:
            raise refusal(rank.number, outcome)
        self._end(text, RANK_LOST_STATUS)

    # -- what the other ranks send ----------------------------------------------------------------

    def _hear_outcome(self, rank: _Rank, outcome: Outcome) -> None:
        """In the thread that reads: rank 0 may wait for a rank that has failed."""
        if outcome.failed:
            limit_s = min(GRACE_S, self._timeout_s)
            timer = threading.Timer(limit_s, self._check_failed, (rank, outcome, self._calls))
            timer.daemon = True
            timer.start()
        rank.outcomes.put(outcome)

    def _check_failed(self, rank: _Rank, outcome: Outcome, call: int) -> None:
        if self._running and self._calls == call:
            if not call:
                self._on_refusal(refusal(rank.number, outcome))
            self._end(
                f"rank {rank.number} failed and the others did not: {outcome}", RANK_LOST_STATUS
            )

    def _lose(self, rank: _Rank) -> None:
        if self._closing:
            return
        try:
            status = rank.process.wait(EXIT_S)
        except Exception:  # noqa: BLE001  it has closed its socket and lives
            status = None
        self._end(
            f"rank {rank.number} ended ({describe(status)})",
            # A rank that ended by itself without an error did so because it lost this one.
            status or RANK_LOST_STATUS,
        )

    def _end(self, reason: str, status: int) -> NoReturn:
        with self._lock:  # the first thread that sees it ends the process
            self._closing = True
            for rank in self._ranks:
                rank.process.kill()
                rank.channel.close()
            self._on_end(reason, status)

    # -- to the other ranks -----------------------------------------------------------------------

    def tell_all(self, kind: str, value: object) -> None:
        for rank in self._ranks:
            rank.channel.send((kind, value))

    # Of `process_group.Decisions`.

    def tell(self, value: object) -> None:
        self.tell_all("decision", value)

    def hear(self) -> Any:
        raise AssertionError("rank 0 decides")

    def close(self) -> None:
        """Ends the other ranks."""
        self._closing = True
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            rank.process.wait(EXIT_S)
        self._group.close()


def describe(status: int | None) -> str:
    if status is None:
        return "it does not answer"
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


def end_like(reason: str, status: int) -> NoReturn:
    """Ends this process in the way in which another one has ended, as the server needs to know."""
    log.critical("%s; the engine ends", reason)
    if status == -signal.SIGKILL:
        # Killed from outside, or for lack of memory: not by what it computed.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status if status > 0 else RANK_LOST_STATUS)

"""The other ranks of an engine: make the calls of rank 0 on their own part of the model."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from tinkex.engine.device import choose_device, is_device_lost, is_out_of_memory
from tinkex.engine.engine import Engine
from tinkex.engine.input_checks import PreparedImages
from tinkex.engine.ranks.channel import Channel, Inbox, OutOfStep
from tinkex.engine.ranks.engine import Outcome
from tinkex.engine.ranks.process_group import ProcessGroup
from tinkex.engine.ranks.rank_settings import settings_of_rank
from tinkex.engine.training.passes import Pass
from tinkex.wire import engine_protocol
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import ForwardBackwardInput

log = logging.getLogger("tinkex.engine.ranks")

#: `prctl` of Linux: the signal that this process gets when its parent dies.
PR_SET_PDEATHSIG = 1


def run(settings: EngineSettings, rank: int, descriptor: int) -> NoReturn:
    """The process of a rank: `descriptor` is its end of the socket to rank 0."""
    die_with_parent()
    follow(settings, rank, socket.socket(fileno=descriptor))


def follow(settings: EngineSettings, rank: int, control: socket.socket) -> NoReturn:
    """Runs until rank 0 ends."""
    inbox = Inbox()
    channel = Channel(control, on_message=inbox.put, on_end=lambda: os._exit(0))
    channel.start()
    rendezvous = Path(inbox.next("join"))
    own = settings_of_rank(settings, rank)
    group = ProcessGroup(
        rank=rank,
        size=settings.ranks,
        device=choose_device(own),
        rendezvous=rendezvous,
        decisions=inbox,
        timeout_s=settings.rank_timeout_s,
    )
    try:
        calls = Calls(Engine(own, group=group))
    except Exception as error:
        log.error("rank %d cannot load its part of the model", rank, exc_info=error)
        channel.send(Outcome.of(error))
        threading.Event().wait()  # rank 0 ends, and so does this process
        raise
    channel.send(Outcome.of(None))
    while True:
        name, args, kwargs = inbox.next("call")
        try:
            calls.make(name, args, kwargs)
        except OutOfStep as error:
            log.critical("%s; this process ends, and the engine with it", error)
            os._exit(engine_protocol.RANK_LOST_STATUS)
        except Exception as error:
            if is_device_lost(error) or is_out_of_memory(error):
                log.critical("rank %d cannot use its device any longer", rank, exc_info=error)
                os._exit(engine_protocol.DEVICE_LOST_STATUS)
            if not isinstance(error, UserFailure):
                log.error("`%s` failed on rank %d", name, rank, exc_info=error)
            channel.send(Outcome.of(error))
        else:
            channel.send(Outcome.of(None))


class Calls:
    """Makes the calls of rank 0. A pass has a number, because it exists on each rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._passes: dict[int, Pass] = {}

    def make(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "begin_pass":
            self._begin_pass(*args)
        elif name == "run_micro_batch":
            self._run_micro_batch(*args)
        else:
            getattr(self._engine, name)(*args, **kwargs)
        if name == "advance":
            self._engine.partial_outputs()  # which rank 0 reports

    def _begin_pass(
        self,
        number: int,
        model_id: str,
        work: ForwardBackwardInput,
        backward: bool,
        images: PreparedImages,
    ) -> None:
        self._passes[number] = self._engine.begin_pass(
            model_id, work, backward=backward, images=images
        )

    def _run_micro_batch(self, slices: list[tuple[int, int]], dropped: list[int]) -> None:
        for number in dropped:
            self._passes.pop(number, None)
        self._engine.run_micro_batch([(self._passes[number], count) for number, count in slices])


def die_with_parent() -> None:
    """Even if this process is stopped or stuck, it ends with rank 0. Only Linux can do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

"""A rank that is lost ends its engine, with the reason and in a limited time."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from numerics.helpers import weighted, work
from ranks.ranked import Forked, fork, forked
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.ranks import follower
from tinkex.engine.ranks.engine import RankedEngine
from tinkex.wire.engine_protocol import DEVICE_LOST_STATUS, RANK_LOST_STATUS
from tinkex.wire.training import AdamOptimizerConfig, LoraConfig
from waiting import until

LIMIT_S = 4.0


class Ended(Exception):
    """Instead of the end of the process."""


class Lost:
    """An engine of two ranks that records why it ends."""

    def __init__(
        self, folder: Path, start: Callable[..., Forked] = fork, *, limit_s: float = LIMIT_S
    ) -> None:
        self.ends: list[tuple[str, int]] = []
        self.others: list[Forked] = []

        def started(*args: Any) -> Forked:
            self.others.append(start(*args))
            return self.others[-1]

        def end(reason: str, status: int) -> None:
            self.ends.append((reason, status))
            if threading.current_thread() is threading.main_thread():
                raise Ended(reason)

        settings = EngineSettings(
            name="tiny", folder=folder, device="cpu", ranks=2, rank_timeout_s=limit_s, kv_tokens=64
        )
        self.engine: Any = None
        with suppress(Ended):
            self.engine = RankedEngine(settings, start=started, on_end=cast(Any, end))

    @property
    def reason(self) -> str:
        assert self.ends
        return self.ends[0][0]

    @property
    def status(self) -> int:
        return self.ends[0][1]


def one_pass(engine: Any) -> None:
    engine.create("m", LoraConfig(rank=4), AdamOptimizerConfig())
    engine.run_pass("m", work([weighted(np.random.default_rng(0), 9)]), backward=True)


def test_a_killed_rank(models: dict[str, Path]) -> None:
    lost = Lost(models["llama"])
    one_pass(lost.engine)
    lost.others[0].kill()
    until(lambda: lost.ends)
    # Rank 0 ends in the same way, so that the server does not suspect what it computed.
    assert (lost.reason, lost.status) == ("rank 1 ended (SIGKILL)", -signal.SIGKILL)


def test_a_rank_that_does_not_answer(models: dict[str, Path]) -> None:
    lost = Lost(models["llama"])
    os.kill(lost.others[0].pid, signal.SIGSTOP)
    with pytest.raises(Ended, match="did not answer for 4 s"):
        one_pass(lost.engine)
    assert lost.status == RANK_LOST_STATUS


def ends(settings: str, rank: int, control: socket.socket) -> None:
    os._exit(5)


def never_joins(settings: str, rank: int, control: socket.socket) -> None:
    time.sleep(600)


def fails_at_start(settings: str, rank: int, control: socket.socket) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("no memory here")

    follower.Engine = refuse  # type: ignore[assignment, misc]
    follower.follow(EngineSettings.from_json(settings), rank, control)


def fails_once(settings: str, rank: int, control: socket.socket) -> None:
    def fail(*args: Any) -> NoReturn:
        raise RuntimeError("only here")

    Engine.clear_gradients = fail  # type: ignore[method-assign]
    follower.follow(EngineSettings.from_json(settings), rank, control)


def loses_its_device(settings: str, rank: int, control: socket.socket) -> None:
    def fail(*args: Any) -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    Engine.clear_gradients = fail  # type: ignore[method-assign]
    follower.follow(EngineSettings.from_json(settings), rank, control)


def test_a_rank_that_ends_before_it_has_joined(models: dict[str, Path]) -> None:
    lost = Lost(models["llama"], forked(ends))
    assert (lost.reason, lost.status) == ("rank 1 ended (exit status 5)", 5)


def test_a_rank_that_never_joins(models: dict[str, Path]) -> None:
    lost = Lost(models["llama"], forked(never_joins))
    assert "one did not answer for 4 s" in lost.reason
    assert lost.status == RANK_LOST_STATUS


def test_a_rank_that_cannot_load_its_part(models: dict[str, Path]) -> None:
    # It has to join first, which takes a while on a busy machine.
    lost = Lost(models["llama"], forked(fails_at_start), limit_s=2 * LIMIT_S)
    assert "RuntimeError: no memory here" in " ".join(reason for reason, _ in lost.ends)


def test_a_call_that_fails_on_one_rank_only(models: dict[str, Path]) -> None:
    lost = Lost(models["llama"], forked(fails_once))
    one_pass(lost.engine)
    with pytest.raises(Ended, match="rank 1: RuntimeError: only here; rank 0: no error"):
        lost.engine.clear_gradients("m")
    assert lost.status == RANK_LOST_STATUS


def test_a_rank_whose_device_is_lost(models: dict[str, Path]) -> None:
    lost = Lost(models["llama"], forked(loses_its_device))
    one_pass(lost.engine)
    with suppress(Ended):
        lost.engine.clear_gradients("m")
    until(lambda: lost.ends)
    assert lost.status == DEVICE_LOST_STATUS

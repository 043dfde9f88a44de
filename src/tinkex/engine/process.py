"""
Runs an engine as its own process: orders arrive over a socket, reports go back.

    python -m tinkex.engine --fd N --settings JSON

One thread reads the socket (`connection`), another computes (`worker`). When the web process closes
the socket, this process exits at once, even in the middle of a computation; saves are atomic.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable
from typing import cast

import torch
from safetensors import SafetensorError

from tinkex.engine import Engine
from tinkex.engine.adapters.memory_plan import DoesNotFit
from tinkex.engine.connection import Connection
from tinkex.engine.device import UnusableDevice
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.numerics import NumericsChanged
from tinkex.engine.ranks import follower
from tinkex.engine.ranks.engine import RankedEngine, RefusedByRank
from tinkex.engine.worker import Worker
from tinkex.models.gguf import GgufError
from tinkex.models.weight_file_checks import RefusedFolder
from tinkex.wire import engine_protocol
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.proto import frames_pb2
from tinkex.wire.redaction import RedactingFormatter

log = logging.getLogger("tinkex.engine.process")

#: What a wrong setting, a damaged model folder or a small machine causes; the message says enough.
EXPECTED = (
    UnusableDevice,
    NumericsChanged,
    DoesNotFit,
    UnsupportedModel,
    RefusedByRank,
    RefusedFolder,
    GgufError,
    SafetensorError,
    OSError,
    torch.OutOfMemoryError,
)


def _begin_log(rank: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    who = f"engine, rank {rank}:" if rank else "engine"
    handler.setFormatter(RedactingFormatter(f"%(asctime)s {who} %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--settings", type=EngineSettings.from_json, required=True)
    # Of a process that rank 0 has started; `--fd` is then their socket.
    parser.add_argument("--rank", type=int, default=0)
    return parser


def main() -> None:
    options = parser().parse_args()
    settings: EngineSettings = options.settings
    _begin_log(options.rank)
    # A service manager sends SIGTERM to all processes at once. The web process needs this process
    # until it has finished its work. Then it closes the socket, which ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.rank:
        follower.run(settings, options.rank, options.fd)
    connection = Connection(options.fd)
    connection.start_reading()
    engine = load(settings, lambda settings: make_engine(settings, connection))
    if isinstance(engine, frames_pb2.Refused):
        connection.send(engine_protocol.Report(refused=engine))
        return
    connection.send(engine_protocol.Report(ready=engine.facts))
    # Engines on the CPU share a lock, so that only one of them computes at a time.
    compute_lock = settings.compute_lock if engine.facts.device.startswith("cpu") else None
    Worker(engine, connection, compute_lock=compute_lock).run()


def load(
    settings: EngineSettings, make: Callable[[EngineSettings], Engine] = Engine
) -> Engine | frames_pb2.Refused:
    """The engine, or why there is none."""
    log.info("loading %s from %s", settings.name, settings.folder)
    began_s = time.perf_counter()
    try:
        engine = make(settings)
    except Exception as error:
        # The command line shows the message. Only a bug needs the traceback too.
        if not isinstance(error, EXPECTED):
            log.exception("%s cannot be loaded", settings.name)
        return refusal(settings.name, error)
    log.info("loaded %s in %.1f s", settings.name, time.perf_counter() - began_s)
    return engine


def make_engine(settings: EngineSettings, connection: Connection) -> Engine:
    if settings.ranks == 1:
        return Engine(settings)
    engine = RankedEngine(
        settings,
        # The socket of a dead engine ends when all its ranks have: no new one starts beside them.
        keeps=connection.descriptor,
        on_refusal=lambda error: connection.send(
            engine_protocol.Report(refused=refusal(settings.name, error))
        ),
    )
    return cast(Engine, engine)


def refusal(name: str, error: Exception) -> frames_pb2.Refused:
    """Why a model cannot be loaded."""
    return frames_pb2.Refused(
        message=f"{name} cannot be loaded: {error}", hint=getattr(error, "hint", "")
    )

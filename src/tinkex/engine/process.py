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

import torch
from safetensors import SafetensorError

from tinkex.engine import Engine
from tinkex.engine.adapters.memory_plan import DoesNotFit
from tinkex.engine.connection import Connection
from tinkex.engine.device import UnusableDevice
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.numerics import NumericsChanged
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
    RefusedFolder,
    GgufError,
    SafetensorError,
    OSError,
    torch.OutOfMemoryError,
)


def _begin_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(asctime)s engine %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--settings", type=EngineSettings.from_json, required=True)
    return parser


def main() -> None:
    options = parser().parse_args()
    settings: EngineSettings = options.settings
    _begin_log()
    # A service manager sends SIGTERM to all processes at once. The web process needs this process
    # until it has finished its work. Then it closes the socket, which ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(options.fd)
    connection.start_reading()
    engine = load(settings)
    if isinstance(engine, frames_pb2.Refused):
        connection.send(engine_protocol.Report(refused=engine))
        return
    connection.send(engine_protocol.Report(ready=engine.facts))
    # Engines on the CPU share a lock, so that only one of them computes at a time.
    compute_lock = settings.compute_lock if engine.facts.device.startswith("cpu") else None
    Worker(engine, connection, compute_lock=compute_lock).run()


def load(settings: EngineSettings) -> Engine | frames_pb2.Refused:
    """The engine, or why there is none."""
    log.info("loading %s from %s", settings.name, settings.folder)
    began_s = time.perf_counter()
    try:
        engine = Engine(settings)
    except Exception as error:
        # The command line shows the message. Only a bug needs the traceback too.
        if not isinstance(error, EXPECTED):
            log.exception("%s cannot be loaded", settings.name)
        return frames_pb2.Refused(
            message=f"{settings.name} cannot be loaded: {error}", hint=getattr(error, "hint", "")
        )
    log.info("loaded %s in %.1f s", settings.name, time.perf_counter() - began_s)
    return engine

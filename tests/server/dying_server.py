"""
The real application over the echo executor, in a process that a poisonous pass kills.

    python dying_server.py LISTENING_DESCRIPTOR DATA_FOLDER both|web [SETTINGS]

`both`: engine and web process die together. `web`: the engine outlives the web process.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvicorn

from server.echo import BASE, EchoExecutor
from tinkex.server.app import create_app
from tinkex.server.scheduler.crash_isolation import EngineState, InFlightFile
from tinkex.server.settings import Settings
from tinkex.server.store import open_store
from tinkex.server.web_process import uvicorn_config
from tinkex.wire.proto.frames_pb2 import Done, Order

#: A pass with this many tokens is poisonous.
POISON = 13


class Dying(EchoExecutor):
    """Kills its process on a poisonous pass."""

    def __init__(self, how: str, in_flight: InFlightFile) -> None:
        super().__init__()
        self._how = how
        self._in_flight = in_flight

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        # Like real work: others start in the meantime.
        await asyncio.sleep(0.02)
        if work.HasField("run_pass") and work.run_pass.payload.inline.count(bytes([5])) >= POISON:
            if self._how == "web":
                self._in_flight.set_engine_state(EngineState.LEFT)
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(base_model, work, incarnation=incarnation)


async def serve(descriptor: int, folder: str, how: str, others: str = "{}") -> None:
    settings = Settings(data=folder, **json.loads(others))
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )
    in_flight = InFlightFile.for_base_model(settings.folder / "rolls", BASE)
    in_flight.set_engine_state(EngineState.UP)
    app = create_app(settings, Dying(how, in_flight), store, in_flight_files={BASE: in_flight})
    config = uvicorn_config(app, settings)
    try:
        await uvicorn.Server(config).serve(sockets=[socket.socket(fileno=descriptor)])
    finally:
        in_flight.close()
        store.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), *sys.argv[2:]))

"""
The real application over the echo executor, in a process that a poisonous pass kills.

    python dying_server.py LISTENING_DESCRIPTOR DATA_FOLDER crash|kill [SETTINGS [LAST_STATUS]]

`crash`: the pass crashes engine and web process together. `kill`: both are killed from outside then.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvicorn

from server.echo import EchoExecutor
from tinkex.server.app import create_app
from tinkex.server.settings import Settings
from tinkex.server.store import open_store
from tinkex.server.web_process import uvicorn_config
from tinkex.wire.proto.frames_pb2 import Done, Order

#: A pass with this many tokens is poisonous.
POISON = 13


class Dying(EchoExecutor):
    """Ends its process on a poisonous pass."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self._number = number

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        # Like real work: others start in the meantime.
        await asyncio.sleep(0.02)
        if work.HasField("run_pass") and work.run_pass.payload.inline.count(bytes([5])) >= POISON:
            os.kill(os.getpid(), self._number)
        return await super().run(base_model, work, incarnation=incarnation)


async def serve(
    descriptor: int, folder: str, how: str, others: str = "{}", last_status: str = "-9"
) -> None:
    settings = Settings(data=folder, **json.loads(others))
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )
    executor = Dying(signal.SIGSEGV if how == "crash" else signal.SIGKILL)
    app = create_app(settings, executor, store, last_status=int(last_status))
    config = uvicorn_config(app, settings)
    try:
        await uvicorn.Server(config).serve(sockets=[socket.socket(fileno=descriptor)])
    finally:
        store.close()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(serve(int(sys.argv[1]), *sys.argv[2:]))

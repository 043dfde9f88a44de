"""
The real application with `CountingEcho`, as a process that can be killed.

    python -m qa.chaos.echo_server LISTENING_DESCRIPTOR DATA_FOLDER

SIGUSR1 simulates an engine crash: models in memory and running work are lost.
"""

import asyncio
import signal
import socket
import sys

import uvicorn

from qa.faults.counting_server import CountingEcho
from server.echo import EchoExecutor
from tinkex.server.app import create_app
from tinkex.server.settings import Settings
from tinkex.server.store import open_store

#: Steps between two snapshots; small, so that many recoveries start from a snapshot.
SNAPSHOT_STEPS = 23


class CrashingEcho(CountingEcho):
    """`CountingEcho` whose running work is lost when `die` is called."""

    run = EchoExecutor.run


async def serve(descriptor: int, folder: str) -> None:
    settings = Settings(data=folder, snapshot_steps=SNAPSHOT_STEPS)
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )
    executor = CrashingEcho()
    config = uvicorn.Config(
        create_app(settings, executor, store), log_config=None, access_log=False, lifespan="on"
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, executor.die)
    try:
        await uvicorn.Server(config).serve(sockets=[socket.socket(fileno=descriptor)])
    finally:
        store.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))

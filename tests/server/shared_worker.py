"""
A process with a real engine that shares its database with others; a test starts, stops and kills it.

    python shared_worker.py NAME DATABASE-URL DATA-FOLDER MODEL-FOLDER
"""

import asyncio
import logging
import sys
from pathlib import Path

from server.hosting import hosted, local_executor
from serving import TINY


async def main(name: str, url: str, data: str, model: str) -> None:
    executor = local_executor(Path(model), TINY, deterministic=True)
    await executor.start()
    async with hosted(executor, Path(data), worker=name, db=url, long_poll_s=1.0) as api:
        sys.stdout.write(f"{api.http._base_url}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(*sys.argv[1:]))

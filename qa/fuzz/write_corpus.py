"""Writes tests/data/fuzz/bodies.jsonl: python -m qa.fuzz.write_corpus [BODIES] [SEED]"""

import asyncio
import sys
import tempfile
from pathlib import Path

from qa.fuzz import request_bodies as bodies

#: Bytes of a body; larger ones make the corpus hard to review.
MAX_BODY_BYTES = 4_000


async def write(count: int, seed: int) -> int:
    """Writes the first body for each kind of answer; how many."""
    with tempfile.TemporaryDirectory() as folder:
        async with bodies.app_client(Path(folder)) as client:
            supply = bodies.BodyGenerator(seed)
            ids = await bodies.create_resources(client)
            found = bodies.Findings()
            for _ in range(count):
                await bodies.send_and_check(client, supply.next(ids), found)
    lines = sorted(
        bodies.corpus_line(case, ids)
        for case in found.interesting.values()
        if len(case.body) <= MAX_BODY_BYTES and case.content_type.isascii()
    )
    bodies.CORPUS.parent.mkdir(exist_ok=True)
    bodies.CORPUS.write_text("\n".join(lines) + "\n")
    return len(lines)


if __name__ == "__main__":
    numbers = [int(name) for name in sys.argv[1:]]
    print(asyncio.run(write(*(numbers + [6_000, 1][len(numbers) :]))))

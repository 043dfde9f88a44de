"""Writes tests/data/fuzz/bodies.jsonl: python -m qa.fuzz.write_corpus [BODIES] [SEED]"""

import asyncio
import sys
import tempfile
from pathlib import Path

from qa.fuzz import request_bodies as bodies

#: A corpus is read by people too.
LARGEST = 4_000


async def written(count: int, seed: int) -> int:
    """One body for each kind of answer, the first that was found."""
    with tempfile.TemporaryDirectory() as folder:
        async with bodies.line(Path(folder)) as line:
            supply = bodies.Bodies(seed)
            ids = await bodies.things(line)
            found = bodies.Found()
            for _ in range(count):
                await bodies.checked(line, supply.next(ids), found)
    lines = sorted(
        bodies.kept(case, ids)
        for case in found.interesting.values()
        if len(case.body) <= LARGEST and case.content_type.isascii()
    )
    bodies.CORPUS.parent.mkdir(exist_ok=True)
    bodies.CORPUS.write_text("\n".join(lines) + "\n")
    return len(lines)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    print(asyncio.run(written(*(numbers + [6_000, 1][len(numbers) :]))))

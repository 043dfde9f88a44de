"""
Memory of a server while thousands of samples of hundreds of sessions wait.

    python -m qa.soak.queued_samples [--samples 5000] [--sessions 200] [--tokens 100]

Prints the memory of the web process and of the engine before, while samples wait, and at the end.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from processes import children
from qa.soak.measurements import MEBIBYTE, resident_bytes
from serving import TINY, serving
from tinkex.testing import write_tiny_model

# Long enough that all samples are accepted before many have finished.
MAX_TOKENS = 64


async def submit_samples(url: str, *, samples: int, sessions: int, tokens: int) -> list[str]:
    """Submits samples; their request ids."""
    gate = asyncio.Semaphore(100)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:

        async def post(route: str, **body: object) -> dict[str, str]:
            async with gate, http.post(f"/api/v1/{route}", json=body) as got:
                assert got.status == 200, await got.text()
                answer: dict[str, str] = await got.json()
                return answer

        async def sampler() -> str:
            made = await post("create_session", tags=[], user_metadata={}, sdk_version="0.36.0")
            sampling = await post(
                "create_sampling_session",
                session_id=made["session_id"],
                sampling_session_seq_id=0,
                base_model=TINY,
            )
            return sampling["sampling_session_id"]

        async def submit(number: int) -> str:
            answer = await post(
                "asample",
                sampling_session_id=samplers[number % sessions],
                seq_id=number,
                prompt={"chunks": [{"tokens": [20 + number % 300] * tokens}]},
                sampling_params={"max_tokens": MAX_TOKENS, "stop": []},
            )
            return answer["request_id"]

        samplers = await asyncio.gather(*(sampler() for _ in range(sessions)))
        return await asyncio.gather(*map(submit, range(samples)))


async def open_requests(url: str) -> int:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as got:
        for line in (await got.text()).splitlines():
            if line.startswith("tinkex_requests_open "):
                return int(float(line.split()[-1]))
    raise LookupError("the metrics page lacks tinkex_requests_open")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()

    def report(what: str, waiting: int, before: tuple[int, int] | None = None) -> tuple[int, int]:
        now = (resident_bytes(web), resident_bytes(engine))
        text = f"{what}: {waiting} waiting; web {now[0] / MEBIBYTE:.0f} MiB, engine {now[1] / MEBIBYTE:.0f} MiB"
        if before is not None and waiting:
            each = [(new - old) / waiting / 1024 for new, old in zip(now, before, strict=True)]
            text += f"; per sample {each[0]:.1f} and {each[1]:.1f} KiB"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        return now

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        with serving(f"{TINY}={model}", data=Path(folder) / "data") as server:
            (web,) = children(server.process.pid)
            (engine,) = children(web)
            asyncio.run(submit_samples(server.url, samples=20, sessions=1, tokens=options.tokens))
            while asyncio.run(open_requests(server.url)):
                time.sleep(0.5)
            before = report("before", 0)
            began_s = time.monotonic()
            asyncio.run(
                submit_samples(
                    server.url,
                    samples=options.samples,
                    sessions=options.sessions,
                    tokens=options.tokens,
                )
            )
            waiting = asyncio.run(open_requests(server.url))
            report(f"accepted in {time.monotonic() - began_s:.0f} s", waiting, before)
            while asyncio.run(open_requests(server.url)):
                time.sleep(1)
            report(f"all done after {time.monotonic() - began_s:.0f} s", 0)


if __name__ == "__main__":
    main()

"""
Throughput of OpenAI's routes against `SamplingClient`, for the same requests on the same server.

    python benchmarks/bench_openai.py [--requests 128] [--tokens 64] [--rounds 5] [--model SPEC]

All requests of a round are sent at once: through `SamplingClient`, as plain HTTP to OpenAI's routes,
and through the official `openai` package without and with streams. The ways take turns, so that other
work on the machine meets all of them alike. Ratios are to `sample` or, for streams, to `sample_stream`.
The same seeds give the same tokens, which is checked.

Server and client share the cores here, so tokens per second depend on the CPU time of both. The report
has them apart: `server` is the web process and the engine, `client` is this program. CPU time hardly
depends on what else the machine does. Plain HTTP is what a lean client of the routes gets; what the
`openai` package needs beyond that is its own work.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import openai

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reports

import tinkex
from processes import children
from serving import TINY, Server, serving
from tinkex.models.resolve import resolve
from tinkex.testing import write_tiny_model

LIMIT = 0.9
PROMPT = "The ship left the harbour in the morning with thirty sailors and a cat on board. "

#: The tokens of each request, by its seed.
Tokens = list[list[int]]


def through_tinker(
    sampling: tinkex.SamplingClient, prompt: list[int], args: argparse.Namespace
) -> Tokens:
    futures = [
        sampling.sample(
            tinkex.ModelInput.from_ints([*prompt, 10 + seed % 100]),
            1,
            tinkex.SamplingParams(max_tokens=args.tokens, seed=seed),
        )
        for seed in range(args.requests)
    ]
    return [future.result().sequences[0].tokens for future in futures]


def through_tinker_streams(
    sampling: tinkex.SamplingClient, prompt: list[int], args: argparse.Namespace
) -> Tokens:
    """All streams are opened first; then each is read to its end."""
    streams = [
        sampling.sample_stream(
            tinkex.ModelInput.from_ints([*prompt, 10 + seed % 100]),
            1,
            tinkex.SamplingParams(max_tokens=args.tokens, seed=seed),
        )
        for seed in range(args.requests)
    ]
    return [[token for event in stream for token in event.tokens] for stream in streams]


class OpenAiWays:
    """The same requests through OpenAI's routes, with connections that are kept."""

    def __init__(self, url: str, model: str, prompt: list[int], args: argparse.Namespace) -> None:
        self._args = args
        self._runner = asyncio.Runner()
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", timeout=600)
        self._http = self._runner.run(self._session(url))
        self._bodies = [
            {
                "model": model,
                "prompt": [*prompt, 10 + seed % 100],
                "max_tokens": args.tokens,
                "seed": seed,
                "return_token_ids": True,
            }
            for seed in range(args.requests)
        ]

    async def _session(self, url: str) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))

    def close(self) -> None:
        self._runner.run(self._http.close())
        self._runner.run(self._client.close())
        self._runner.close()

    def run(self, one: Callable[[dict[str, Any]], Awaitable[list[int]]]) -> Tokens:
        async def all_of_them() -> Tokens:
            return await asyncio.gather(*map(one, self._bodies))

        return self._runner.run(all_of_them())

    async def plain(self, body: dict[str, Any]) -> list[int]:
        async with self._http.post("/v1/completions", json=body) as answer:
            return json.loads(await answer.read())["choices"][0]["token_ids"]

    async def plain_stream(self, body: dict[str, Any]) -> list[int]:
        tokens: list[int] = []
        async with self._http.post("/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += choice.get("token_ids") or []
        return tokens

    async def complete(self, body: dict[str, Any]) -> list[int]:
        asked = {**body, "extra_body": {"return_token_ids": body["return_token_ids"]}}
        del asked["return_token_ids"]
        answer = await self._client.completions.create(**asked)
        return answer.choices[0].model_extra["token_ids"]

    async def stream(self, body: dict[str, Any]) -> list[int]:
        asked = {**body, "extra_body": {"return_token_ids": body["return_token_ids"]}}
        del asked["return_token_ids"]
        tokens: list[int] = []
        async for chunk in await self._client.completions.create(**asked, stream=True):
            if chunk.choices:
                tokens += chunk.choices[0].model_extra.get("token_ids") or []
        return tokens


def cpu_seconds(pid: int) -> float:
    """CPU time of a server: the supervisor, the web process and the engines."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(map(cpu_seconds, children(pid)))


def measured(name: str, server: Server, args: argparse.Namespace) -> list[str]:
    """Rows of the report for one model."""
    url = server.url
    with tinkex.ServiceClient(base_url=url) as service:
        sampling = service.create_sampling_client(base_model=name)
        prompt = sampling._load_tokenizer(light=True).encode(PROMPT)
        through = OpenAiWays(url, name, prompt, args)
        ways: dict[str, Callable[[], Tokens]] = {
            "SamplingClient.sample": lambda: through_tinker(sampling, prompt, args),
            "plain HTTP, completions": lambda: through.run(through.plain),
            "openai, completions": lambda: through.run(through.complete),
            "SamplingClient.sample_stream": lambda: through_tinker_streams(sampling, prompt, args),
            "plain HTTP, streams": lambda: through.run(through.plain_stream),
            "openai, streams": lambda: through.run(through.stream),
        }
        found: dict[str, list[Round]] = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            sampled = {}
            # In another order each time: the machine may get busier during a round.
            for way, run in random.sample(list(ways.items()), len(ways)):
                began, ours_s = time.perf_counter(), time.process_time()
                theirs_s = cpu_seconds(server.process.pid)
                sampled[way] = run()
                one = Round(
                    tokens_per_s=sum(map(len, sampled[way])) / (time.perf_counter() - began),
                    server_ms=1000 * (cpu_seconds(server.process.pid) - theirs_s) / args.requests,
                    client_ms=1000 * (time.process_time() - ours_s) / args.requests,
                )
                if number:  # the first round warms up
                    found[way].append(one)
            reference = sampled["SamplingClient.sample"]
            for way, tokens in sampled.items():
                assert tokens == reference, f"{way} sampled other tokens"
        through.close()
    rows = []
    for way, rounds in found.items():
        same = "SamplingClient.sample_stream" if "stream" in way else "SamplingClient.sample"
        rates = [one.tokens_per_s for one in rounds]
        # Round by round: other work on the machine changes over minutes.
        ratio = statistics.median(
            one.tokens_per_s / other.tokens_per_s
            for one, other in zip(rounds, found[same], strict=True)
        )
        server_ms, client_ms = (
            statistics.mean(getattr(one, name) for one in rounds)
            for name in ("server_ms", "client_ms")
        )
        usual_ms = statistics.mean(one.server_ms for one in found[same])
        rows.append(
            f"| {way} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} | "
            f"{ratio:.2f} | {server_ms:.2f} | {usual_ms / server_ms:.2f} | {client_ms:.2f} |"
        )
    return rows


@dataclass(frozen=True, kw_only=True)
class Round:
    """One way in one round; CPU times are for one request."""

    tokens_per_s: float
    server_ms: float
    client_ms: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", help="NAME or FOLDER  [default: the tiny model]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if args.model is None:
            name, spec = TINY, f"{TINY}={write_tiny_model(folder / 'tiny', arch='llama')}"
        else:
            source = resolve(args.model)
            name, spec = source.name, f"{source.name}={source.folder}"
        with serving(spec, data=folder / "data") as server:
            rows = measured(name, server, args)
    text = reports.head(
        "OpenAI's routes against SamplingClient",
        " ".join(["python benchmarks/bench_openai.py", *sys.argv[1:]]),
        f"openai {version('openai')}",
    )
    text += f"""
{name}: {args.requests} requests at once, {args.tokens} tokens each; {args.rounds} rounds in turn. Limit: {LIMIT}.
CPU times are for one request. The ratio of the server is the CPU time of `SamplingClient` to that of the way: more than 1 is cheaper.

| way | tokens/s, median | range | ratio | server, CPU ms | its ratio | client, CPU ms |
|---|--:|--:|--:|--:|--:|--:|
"""
    reports.write("openai", text + "\n".join(rows) + "\n", args.out)


if __name__ == "__main__":
    main()

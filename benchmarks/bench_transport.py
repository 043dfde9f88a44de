"""
HTTP packages for the client's transport: requests per second, CPU time, size, and use after a fork.

    python benchmarks/bench_transport.py [--rounds 3] [--only FORM]

A raw loopback server in another process answers every POST immediately with a small JSON body, so only
the client is measured. Each case runs in a fresh interpreter: small JSON bodies (a sample request of
400 tokens) with 1, 200 and 2,000 in flight, and bodies of 5 MB (one chunk of a forward_backward) with
1 and 8 in flight. CPU time is that of the client process, all threads. The last columns show whether
a forked child can send requests, and how many interpreters a signal killed while they exited.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import reports

CASES = {
    # name: (requests, in flight, body bytes)
    "1 in flight": (1_500, 1, 2_400),
    "200 in flight": (6_000, 200, 2_400),
    "2000 in flight": (8_000, 2_000, 2_400),
    "5 MB, 1 in flight": (40, 1, 5_000_000),
    "5 MB, 8 in flight": (80, 8, 5_000_000),
}
ANSWER = b'{"request_id":"r-0123456789abcdef","model_id":"s-0123:train:0"}'
# The third form shows the cost of `trust_env`: aiohttp then reads the proxy variables for each
# request. The client looks up the proxy once instead.
FORMS = ("aiohttp", "pyqwest", "aiohttp, trust_env")


class Instant(asyncio.Protocol):
    """Enough HTTP/1.1 to skip a body and respond; nothing is decoded."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.head = b""
        self.missing = 0

    def data_received(self, data: bytes) -> None:
        while data:
            if self.missing:
                taken = min(self.missing, len(data))
                self.missing -= taken
                data = data[taken:]
                if not self.missing:
                    self.answer()
                continue
            self.head += data
            head, found, data = self.head.partition(b"\r\n\r\n")
            if not found:
                return
            self.head = b""
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    self.missing = int(line.split(b":")[1])
            if not self.missing:
                self.answer()

    def answer(self) -> None:
        self.transport.write(  # type: ignore[attr-defined]
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(ANSWER), ANSWER)
        )


def serve(port_to: multiprocessing.connection.Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(
            Instant, "127.0.0.1", 0, backlog=4096
        )
        port_to.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


Send = Callable[[bytes], Awaitable[bytes]]
HEADERS = {"content-type": "application/json", "x-api-key": "tml-0123456789", "accept": "*/*"}


@asynccontextmanager
async def sender(package: str, url: str):  # type: ignore[no-untyped-def]
    if package.startswith("aiohttp"):
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0)
        trust_env = package != "aiohttp"
        async with aiohttp.ClientSession(connector=connector, trust_env=trust_env) as session:

            async def send(body: bytes) -> bytes:
                async with session.post(url, data=body, headers=HEADERS) as response:
                    return await response.read()

            yield send
    else:
        import pyqwest

        transport = pyqwest.HTTPTransport(
            tls_include_system_certs=True, pool_max_idle_per_host=2_000, enable_otel=False
        )
        async with transport:
            client = pyqwest.Client(transport)

            async def send(body: bytes) -> bytes:
                return (await client.post(url, headers=HEADERS, content=body)).content

            yield send


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def run_case(package: str, url: str, case: str) -> dict[str, float]:
    requests, in_flight, size = CASES[case]
    body = json.dumps({"tokens": list(range(size // 6))}).encode()
    body = (body + b" " * size)[:size]
    async with sender(package, url) as send:
        left = iter(range(requests))

        async def worker() -> None:
            for _ in left:
                assert await send(body) == ANSWER

        async def warm() -> None:
            assert await send(body) == ANSWER

        await asyncio.gather(*(warm() for _ in range(in_flight)))
        started, cpu = time.perf_counter(), cpu_s()
        await asyncio.gather(*(worker() for _ in range(in_flight)))
        took, cpu = time.perf_counter() - started, cpu_s() - cpu
    return {
        "per_s": requests / took,
        "cpu_ms": cpu / requests * 1e3,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def once(package: str, url: str) -> bytes:
    async with sender(package, url) as send:
        return await send(b"{}")


def works_after_fork(package: str, url: str) -> bool:
    """Sends a request, forks, and sends one from a new client in the child."""
    asyncio.run(once(package, url))
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(asyncio.wait_for(once(package, url), 5))
        except BaseException:  # noqa: BLE001 (the child must exit here)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def import_cost(package: str) -> tuple[float, int]:
    """CPU seconds and number of modules of an import in a fresh interpreter."""
    code = (
        "import sys, time; before = len(sys.modules); import asyncio, ssl; base = len(sys.modules);"
        f"t = time.process_time(); import {package};"
        "print(time.process_time() - t, len(sys.modules) - base)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split()
        for _ in range(5)
    ]
    return min(float(cpu) for cpu, _ in runs), int(runs[0][1])


def installed(package: str) -> tuple[float, int]:
    """Megabytes and number of distributions that the package installs, itself included."""
    todo, seen, size = [package], set(), 0
    while todo:
        name = todo.pop()
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        key = dist.metadata["Name"].lower().replace("_", "-")
        if key in seen:
            continue
        seen.add(key)
        for file in dist.files or ():
            path = file.locate()
            if path.is_file() and path.suffix != ".pyc":  # type: ignore[attr-defined]
                size += path.stat().st_size  # type: ignore[attr-defined]
        todo += [
            requirement.split(";")[0].split("[")[0].strip(" ()<>=!~0123456789.,*")
            for requirement in dist.requires or ()
            if "extra ==" not in requirement
        ]
    return size / 1e6, len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=FORMS)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)  # package, url, case
    args = parser.parse_args()
    if args.case:
        package, url, case = args.case
        if case == "fork":
            print(json.dumps(works_after_fork(package, url)), flush=True)
        else:
            print(json.dumps(asyncio.run(run_case(package, url, case))), flush=True)
        return

    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{mine.recv()}/api/v1/asample"

    exits: dict[str, list[int]] = {package: [] for package in FORMS}

    def measure(package: str, case: str) -> object:
        command = [sys.executable, __file__, "--case", package, url, case]
        done = subprocess.run(command, capture_output=True, check=False)
        exits[package].append(done.returncode)
        if not done.stdout.strip():
            raise SystemExit(done.stderr.decode() or f"{command} ended with {done.returncode}")
        return json.loads(done.stdout)

    packages = [args.only] if args.only else FORMS
    command = f"python benchmarks/bench_transport.py --rounds {args.rounds}"
    lines = [
        reports.head("HTTP packages for the client", command),
        "| case | package | requests/s | CPU ms per request | peak RSS MB |\n|---|---|---|---|---|",
    ]
    for case in CASES:
        # Alternating rounds, so that a busy machine affects all equally.
        results: dict[str, list[dict[str, float]]] = {package: [] for package in packages}
        for _ in range(args.rounds):
            for package in packages:
                results[package].append(measure(package, case))  # type: ignore[arg-type]
        for package in packages:
            rows = results[package]
            lines.append(
                f"| {case} | {package} | {statistics.median(r['per_s'] for r in rows):.0f} "
                f"| {statistics.median(r['cpu_ms'] for r in rows):.3f} "
                f"| {statistics.median(r['rss_mb'] for r in rows):.0f} |"
            )
            print(lines[-1], file=sys.stderr)
    lines.append(
        "\n| package | import CPU ms | modules | installed MB | distributions | after fork "
        "| killed at exit |\n|---|---|---|---|---|---|---|"
    )
    for package in packages:
        if "," in package:
            continue
        cpu, modules = import_cost(package)
        size, count = installed(package)
        fork = "sends" if measure(package, "fork") else "no response in 5 s"
        killed = f"{sum(code < 0 for code in exits[package])} of {len(exits[package])}"
        lines.append(
            f"| {package} | {cpu * 1e3:.0f} | {modules} | {size:.1f} | {count} | {fork} | {killed} |"
        )
    server.terminate()
    reports.write("transport", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

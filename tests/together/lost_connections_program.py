"""
Connections of clients that vanish: no FIN, no reset, no response to keepalive probes.

    unshare --user --map-root-user --net python lost_connections_program.py DATA_FOLDER

Runs in its own network namespace, and shuts that network down while connections are open. Prints the
number of connections and descriptors as one line of JSON.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server.hosting import Api, hosted
from server.streaming_executor import StreamingExecutor, sample_body
from tinkex.server.api import connection_limits
from waiting import until_async

#: Timeout of dead connections, instead of a minute.
DEAD_S = 3
#: Longer than the test.
NEVER_S = 600.0

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
INTERFACE = struct.Struct("16sh14x")


def set_network(up: bool) -> None:
    """Switches the loopback interface, the only one in this namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _, flags = INTERFACE.unpack(fcntl.ioctl(control, SIOCGIFFLAGS, INTERFACE.pack(b"lo", 0)))
        flags = flags | IFF_UP if up else flags & ~IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, INTERFACE.pack(b"lo", flags))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def request(route: str, body: object, *, length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /api/v1/{route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return head.encode() + data


async def connected(api: Api, data: bytes, *, receive: bool = False) -> socket.socket:
    url = api.http._base_url
    assert url is not None
    made = socket.socket()
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(made, (url.host, url.port))
    await loop.sock_sendall(made, data)
    if receive:
        answer = await loop.sock_recv(made, 65536)
        assert answer.startswith(b"HTTP/1.1 200"), answer
    return made


async def watch(folder: Path) -> dict[str, float]:
    executor = StreamingExecutor()
    limits = {"head_s": 0.0, "stall_s": 0.0, "long_poll_s": NEVER_S, "stream_grace_s": 0.1}
    async with hosted(executor, folder, drain_s=1.0, **limits) as api:
        assert api.server is not None
        state = api.server.server_state
        endless = await api.post("asample", sample_body(10**8))
        before = descriptors()
        healthz = b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        connections = [
            await connected(api, b""),
            await connected(api, healthz, receive=True),
            await connected(api, healthz[:30]),
            await connected(api, request("asample", sample_body(5), length=10**6)),
            await connected(api, request("retrieve_future", endless.json)),
            # Two streams: one whose first bytes were read, and one that was not read.
            await connected(api, request("stream_sample", sample_body(10**8)), receive=True),
            await connected(api, request("stream_sample", sample_body(10**8))),
        ]
        await until_async(
            lambda: len(state.connections) > len(connections) and len(executor.sampled) == 3
        )
        held = len(state.connections)
        during = descriptors()
        set_network(up=False)
        began_s = time.monotonic()
        with contextlib.suppress(AssertionError):
            await until_async(lambda: not state.connections, 10 * DEAD_S)
        closed_after_s = time.monotonic() - began_s
        await asyncio.sleep(0.3)  # stream_grace_s
        cancelled = executor.cancelled
        for connection in connections:
            connection.close()
        await api.http.close()
        return {
            "held": held,
            "left": len(state.connections),
            "closed_after_s": closed_after_s,
            # Without the descriptors of the test's own sockets.
            "more_while_held": during - len(connections) - before,
            "more_after": descriptors() - before,
            "cancelled": cancelled,
        }


if __name__ == "__main__":
    connection_limits.DEAD_PEER_S = DEAD_S
    set_network(up=True)
    print(json.dumps(asyncio.run(watch(Path(sys.argv[1])))))

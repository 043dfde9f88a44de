"""A port for a program that must be told its port, or that comes back at the same one."""

import contextlib
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Where the system begins to choose ports by itself, if it does not say.
USUAL = 32768


def free_port() -> int:
    """
    A port that nobody has, below those that the system chooses.

    One that the system chose it may give to another program before ours has it.
    """
    first = int(RANGE.read_text().split()[0]) if RANGE.exists() else USUAL
    # Not those of the seed: three processes test at the same time.
    for port in random.SystemRandom().sample(range(max(first - 16_000, 1024), first), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"a hundred ports below {first} are taken")

"""Measures memory, descriptors and files of processes over time, and checks for growth. Linux only."""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Allowed growth from the second quarter to the last.
MAX_GROWTH = 0.03
#: Allowed fluctuation of descriptor counts.
DESCRIPTOR_NOISE = 4

MEBIBYTE = 2**20
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One measurement."""

    at_s: float
    web_bytes: int
    web_descriptors: int
    #: Established connections to the web process.
    connections: int
    engine_bytes: int
    engine_descriptors: int
    data_bytes: int
    #: Accepted and unfinished requests.
    open_requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The second and the last quarter of one quantity."""

    what: str
    second: float
    last: float
    bounded: bool
    allowed_more: float = 0.0

    @property
    def growth(self) -> float:
        return self.last / self.second - 1 if self.second else 0.0

    @property
    def is_flat(self) -> bool:
        return self.last <= self.second * (1 + MAX_GROWTH) + self.allowed_more


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def connections(port: int) -> int:
    """The number of established connections to a local port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    here, established = f":{port:04X}", "01"
    return sum(line[1].endswith(here) and line[3] == established for line in lines)


def folder_bytes(folder: Path) -> int:
    """The total size of the files in a folder; files deleted meanwhile count zero."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


def quarter(readings: Sequence[Reading], number: int) -> Sequence[Reading]:
    """The readings in one quarter of the time, 1 to 4."""
    first_s, last_s = readings[0].at_s, readings[-1].at_s
    length_s = (last_s - first_s) / 4
    begin_s = first_s + (number - 1) * length_s
    return [r for r in readings if begin_s <= r.at_s <= begin_s + length_s]


def verdicts(readings: Sequence[Reading]) -> list[Verdict]:
    """All measured quantities, and which of them must be flat."""
    second, last = quarter(readings, 2), quarter(readings, 4)

    def of(
        what: str,
        pick: Callable[[Reading], float],
        *,
        bounded: bool,
        allowed_more: float = 0.0,
    ) -> Verdict:
        return Verdict(
            what=what,
            second=statistics.mean(map(pick, second)),
            last=statistics.mean(map(pick, last)),
            bounded=bounded,
            allowed_more=allowed_more,
        )

    more = DESCRIPTOR_NOISE
    return [
        of("web memory, MiB", lambda r: r.web_bytes / MEBIBYTE, bounded=True),
        of("engine memory, MiB", lambda r: r.engine_bytes / MEBIBYTE, bounded=True),
        # The number of clients varies; descriptors without a client must not grow.
        of(
            "web descriptors without a client",
            lambda r: r.web_descriptors - r.connections,
            bounded=True,
            allowed_more=more,
        ),
        of("engine descriptors", lambda r: r.engine_descriptors, bounded=True, allowed_more=more),
        of("data folder, MiB", lambda r: r.data_bytes / MEBIBYTE, bounded=False),
        of("connections of clients", lambda r: r.connections, bounded=False),
        of("open requests", lambda r: r.open_requests, bounded=False),
    ]


def chart(values: Sequence[float], width: int = 60) -> str:
    """A line of bars with the mean of each interval, scaled from the smallest to the largest."""
    step = max(1.0, len(values) / width)
    means = []
    at = 0.0
    while round(at) < len(values):
        part = values[round(at) : max(round(at) + 1, round(at + step))]
        means.append(statistics.mean(part))
        at += step
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[1 + round((value - low) / span * (len(BARS) - 2))] for value in means)

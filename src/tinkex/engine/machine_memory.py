"""The memory of this machine and of its GPUs, without torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    total: int
    free: int


def free_bytes() -> int:
    """Host memory that can be allocated now without freeing any, within the container's limit."""
    limits = [size for size in (_machine_bytes(), _container_bytes()) if size is not None]
    if limits:
        return min(limits)
    # Not Linux: assume that half of the physical memory is free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def total_bytes() -> int:
    """All host memory, used or not; at most the container's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_limit()
    return machine if limit is None else min(machine, limit)


def gpus() -> list[Gpu]:
    """The GPUs of this machine, as NVIDIA's driver lists them; none if it is not installed."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free"]
    try:
        ran = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in ran.stdout.splitlines():
        name, *sizes = (part.strip() for part in line.rsplit(",", 2))
        # A GPU that shares the memory of its host says "[N/A]".
        if len(sizes) == 2 and all(size.isdecimal() for size in sizes):
            total, free = (int(size) * MEBIBYTE for size in sizes)
            found.append(Gpu(name=name, total=total, free=free))
    return found


def _machine_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _container_limit() -> int | None:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None


def _container_bytes() -> int | None:
    """Free memory within the container's limit, which /proc/meminfo does not include."""
    if (limit := _container_limit()) is None:
        return None
    try:
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        # The kernel reclaims inactive file pages when memory is needed.
        files = 0
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                files = int(line.split()[1])
    except (OSError, ValueError):
        return None
    return max(0, limit - used + files)

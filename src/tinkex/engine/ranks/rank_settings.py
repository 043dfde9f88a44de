"""What differs between the settings of the ranks of an engine: devices and threads."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from tinkex.engine.device import UnusableDevice
from tinkex.wire.engine_settings import EngineSettings


def settings_of_rank(settings: EngineSettings, rank: int) -> EngineSettings:
    """Raises `UnusableDevice` unless each rank has a device of its own."""
    ranks, devices = settings.ranks, settings.device.split(",")
    if devices == ["auto"] and not torch.cuda.is_available():
        devices = ["cpu"]
    threads = settings.threads
    if devices == ["cpu"]:
        # The ranks compute at the same time.
        threads = threads or max(1, (os.cpu_count() or 1) // ranks)
        return replace(settings, device="cpu", threads=threads)
    if devices in (["auto"], ["cuda"]):
        count = torch.cuda.device_count()
        if count < ranks:
            raise UnusableDevice(
                f"one model is to be divided over {ranks} GPUs, and torch finds {count}.",
                hint=f"Use --gpus-per-replica {max(1, count)}, or --device cpu.",
            )
        return replace(settings, device=f"cuda:{(settings.gpu * ranks + rank) % count}")
    if len({*devices}) != ranks:
        raise UnusableDevice(
            f"one model is to be divided over {ranks} GPUs, and its devices are {settings.device}.",
            hint=f"List {ranks} different ones: --device "
            f"{','.join(f'cuda:{each}' for each in range(ranks))}.",
        )
    return replace(settings, device=devices[rank])

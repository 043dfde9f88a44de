"""What the bits of a result depend on besides the request, kept with the data of deterministic runs.

With `--deterministic` one path computes everything: the code of transformers. Another device, number
format or version of a library may still round differently, and then a run that is rebuilt after a
restart is no longer the one that was trained. So the first deterministic engine writes down what it
computes with, and a later one that differs is refused.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch
import transformers

from tinkex.durable_files import write_file

#: Which code computes: change it if deterministic results change their bits.
PATH = "transformers"


class NumericsChanged(ValueError):
    """A deterministic engine would compute other bits than before; the hint says what to do."""

    hint = (
        "Use what was used before, start on another data folder, or start once with "
        "--accept-changed-numerics: runs then continue with other rounding."
    )


def numerics(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        # Sums are divided among threads, and into vectors of the processor's width.
        vectors = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} CPU with {vectors}, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "path": PATH,
    }


def check_numerics(file: Path, now: dict[str, str], *, accept: bool) -> None:
    """Raises `NumericsChanged` if the file has other values. Writes it if there is none."""
    try:
        before: dict[str, str] = json.loads(file.read_bytes())
    except FileNotFoundError:
        before = {}
    if before == now:
        return
    if before and not accept:
        changes = "; ".join(
            f"{key} was {before.get(key, 'unknown')}, now {now.get(key, 'unknown')}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        )
        raise NumericsChanged(
            "this data folder has deterministic runs, and this server would compute other bits: "
            f"{changes}."
        )
    write_file(file, json.dumps(now, indent=1).encode())

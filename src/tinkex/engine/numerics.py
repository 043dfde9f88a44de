"""What the bits of a result depend on besides the request, kept with the data of deterministic runs.

With `--deterministic` one path computes everything: the code of transformers. Another device, number
format or version of a library may still round differently, and then a run that is rebuilt after a
restart is no longer the one that was trained. So the first deterministic engine writes down what it
computes with, and a later one that differs is refused.
"""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path

import torch
import transformers

from tinkex.durable_files import write_file

log = logging.getLogger(__name__)

#: Which code computes: change it if deterministic results change their bits.
PATH = "transformers"


class NumericsChanged(ValueError):
    """A deterministic engine would compute other bits than before; the hint says what to do."""

    hint = (
        "Use what was used before (--threads, --batch-tokens), another data folder, or start once with "
        "--accept-changed-numerics: runs then continue with other rounding."
    )


def numerics(
    device: torch.device, dtype: torch.dtype, *, batch_tokens: int | None, ranks: int = 1
) -> dict[str, str]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        # Sums are divided among threads, and into vectors of the processor's width.
        vectors = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} CPU with {vectors}, {torch.get_num_threads()} threads"
    found = {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "path": PATH,
        # Where a pass is cut into micro-batches changes the order of sums.
        "batch_tokens": "default" if batch_tokens is None else str(batch_tokens),
    }
    # Each rank computes a part of a sum. Without the key: one process, as in older files.
    return found if ranks == 1 else {**found, "ranks": str(ranks)}


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
            "a deterministic server was started on this data folder, and this one would compute "
            f"other bits: {changes}."
        )
    if before:
        log.warning("deterministic runs continue with other rounding: %s", now)
    write_file(file, json.dumps(now, indent=1).encode())

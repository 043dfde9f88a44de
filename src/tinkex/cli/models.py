"""`tinkex models`: which models of the hosted service, and which folders, can be served here."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.output import NONE, as_json, examples, show_json, show_table
from tinkex.wire.text_format import format_bytes

if TYPE_CHECKING:
    from tinkex.engine.model_fit import Fit, Machine

_UNITS = {"": 10**9, "gb": 10**9, "gib": 2**30, "tb": 10**12, "mb": 10**6}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class Size(click.ParamType[int]):
    """A size such as 80GB; without a unit, gigabytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size; write 80GB or 139GiB.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].lower()])


@click.command(
    "models",
    epilog=examples(
        "tinkex models                          # on this machine",
        "tinkex models ~/models/Qwen3-8B        # and a folder of yours",
        "tinkex models --gpu-memory 80GB        # on another machine",
        "tinkex models --rank 8 -f json",
    ),
)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path))
@click.option(
    "--rank", type=click.IntRange(1, 512), default=32, show_default=True, help="Rank of adapters."
)
@click.option(
    "--gpu-memory", type=Size(), help="Ask for a machine with a GPU of this size, such as 141GB."
)
@click.option("--cpu", is_flag=True, help="Ask for the CPU of this machine, although it has a GPU.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Number format of the weights; auto is float32 on a CPU and bfloat16 on a GPU.",
)
def command(
    folders: tuple[Path, ...], rank: int, gpu_memory: int | None, cpu: bool, dtype: str
) -> None:
    """Show which models can be trained and sampled, and whether they fit this machine.

    Lists the models in FOLDERs and those of the hosted service: whether tinkex serves them, which
    layers adapters change, and the memory of the weights, of one adapter in training and of the KV
    cache. Computed from config.json and the headers of the weights; nothing is loaded or downloaded.
    """
    if cpu and gpu_memory is not None:
        raise click.UsageError("--cpu and --gpu-memory exclude each other.")
    try:
        from tinkex.engine.model.model_shape import UnknownShape
        from tinkex.engine.model_fit import candidates, fit
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex models`", "engine") from error
    machine = chosen_machine(gpu_memory, cpu=cpu)
    if dtype == "auto":
        dtype = "float32" if machine.device == "cpu" else "bfloat16"
    element = 4 if dtype == "float32" else 2
    try:
        found = candidates(folder.expanduser() for folder in folders)
    except UnknownShape as error:
        raise CommandFailed(
            f"{error}.", hint="Give a folder in Hugging Face layout: config.json and weights."
        ) from error
    fits = [fit(candidate, machine, element=element, rank=rank) for candidate in found]
    if as_json():
        show_json(
            {
                "machine": {
                    "device": machine.device,
                    "name": machine.name,
                    "free_bytes": machine.free,
                    "total_bytes": machine.total,
                },
                "dtype": dtype,
                "rank": rank,
                "models": [as_fields(each) for each in fits],
            }
        )
        return
    show_table(
        ("Model", "Served", "Fits", "Weights", "Adapter", "KV cache", "Trained, or why not"),
        [cells(each, machine) for each in fits],
        title=title(machine, dtype, rank),
        styles={"yes": "green", "no": "red"},
    )


def chosen_machine(gpu_memory: int | None, *, cpu: bool) -> Machine:
    from tinkex.engine import machine_memory
    from tinkex.engine.model_fit import Machine

    if gpu_memory is not None:
        return Machine(device="cuda", name="a GPU", free=gpu_memory, total=gpu_memory)
    if not cpu and (gpus := machine_memory.gpus()):
        # An engine uses one GPU.
        best = max(gpus, key=lambda gpu: gpu.free)
        return Machine(device="cuda", name=best.name, free=best.free, total=best.total)
    return Machine(
        device="cpu",
        name="CPU",
        free=machine_memory.free_bytes(),
        total=machine_memory.total_bytes(),
    )


def title(machine: Machine, dtype: str, rank: int) -> str:
    free = f"{format_bytes(machine.free)} free"
    if machine.free != machine.total:
        free += f" of {format_bytes(machine.total)}"
    share = "; half of what the weights leave is used" if machine.device == "cpu" else ""
    return (
        f"On {machine.name} with {free}{share}. Weights in {dtype}, one adapter of rank {rank} in "
        "training, KV cache of 1,000 tokens:"
    )


def cells(found: Fit, machine: Machine) -> tuple[str, ...]:
    candidate, needs = found.candidate, found.needs
    served = {True: "yes", False: "no", None: "maybe"}[candidate.served]
    return (
        candidate.name,
        served,
        "" if candidate.served is False else _fits(found, machine),
        NONE if found.weights is None else format_bytes(found.weights),
        "" if needs is None else format_bytes(needs.training_adapter),
        "" if needs is None else format_bytes(1000 * needs.kv_bytes_per_token),
        candidate.reason or candidate.trained,
    )


def _fits(found: Fit, machine: Machine) -> str:
    if found.fits:
        count = f"{found.adapters:,} adapters" if found.adapters != 1 else "1 adapter"
        return f"yes, {count}"
    if found.fits is None:
        return "unknown"
    if found.division is not None:
        gpus, adapters = found.division
        return f"on {gpus} GPUs, {adapters:,} adapter{'s' if adapters != 1 else ''}"
    if found.needed is None:
        return "no"
    if found.needed <= machine.free:
        return f"with --memory-gb {math.ceil(found.needed / 1e8) / 10}"
    return f"no, needs {format_bytes(found.needed)}"


def as_fields(found: Fit) -> dict[str, Any]:
    candidate, needs = found.candidate, found.needs
    return {
        "name": candidate.name,
        "model_type": candidate.type,
        "served": candidate.served,
        "reason": candidate.reason,
        "trained": candidate.trained,
        "weights_bytes": found.weights,
        "adapter_parameters": needs and needs.adapter_numbers,
        "adapter_training_bytes": needs and needs.training_adapter,
        "adapter_sampling_bytes": needs and needs.sampler_adapter,
        "kv_bytes_per_token": needs and needs.kv_bytes_per_token,
        "state_bytes_per_sequence": needs and needs.state_bytes,
        "activation_bytes_per_token": needs and needs.activation_bytes_per_token,
        "fits": found.fits,
        "adapters_that_fit": found.adapters,
        "needed_bytes": found.needed,
        "gpus_needed": 1 if found.fits else found.division and found.division.gpus,
    }

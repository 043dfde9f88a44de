"""Tiny models of model families on a server: what `families_program.py` prints, checked."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numerics.hybrids import HYBRIDS, write_hybrid
from numerics.mixtures import MIXTURES, write_mixture
from numerics.test_families import SERVED, write_model
from serving import serving
from tinkex.models.tiny_model import write_tiny_tokenizer
from together.capabilities import near
from together.official_sdk import run_program

PROGRAM = Path(__file__).with_name("families_program.py")

#: All families that are served.
FAMILIES = [*SERVED, *MIXTURES, *HYBRIDS]

EXPERT_METRICS = {
    *("e_frac_with_tokens:mean", "e_frac_oversubscribed:mean"),
    *("e_max_violation:mean", "e_max_violation:max", "e_min_violation:mean"),
}


def write_family(folder: Path, family: str) -> Path:
    """A tiny model of a family, with a tokenizer."""
    if family in MIXTURES:
        return write_mixture(folder, family)
    if family in HYBRIDS:
        write_hybrid(folder, family)
    else:
        write_model(folder, family, **SERVED[family])
    write_tiny_tokenizer(folder)
    return folder


def run_families(
    version: str, families: Sequence[str], folder: Path, *, timeout_s: float = 200
) -> dict[str, Any]:
    """The program's output with one version of the official SDK, on one server."""
    names = [f"test/{family}" for family in families]
    models = [
        f"{name}={write_family(folder / family, family)}"
        for name, family in zip(names, families, strict=True)
    ]
    with serving(*models, data=folder / "data") as server:
        return run_program(version, PROGRAM, *names, server=server, timeout_s=timeout_s)


def check_family(family: str, found: dict[str, Any]) -> None:
    """It trains, goes on from saved state with the same losses, and samples what it trained."""
    losses = found["losses"]
    assert losses[-1] < losses[0] / 2, losses
    assert near(found["again"], found["later"], 1e-3), (found["again"], found["later"])
    # The rule of recurrent layers rounds differently in sampling and in training.
    within = 1e-2 if family in HYBRIDS else 1e-4
    for forward, samples in zip(found["logprobs"], found["sampled"], strict=True):
        assert samples[0][0] == samples[1][0]
        for tokens, logprobs in samples:
            assert near(logprobs, forward[-len(tokens) :], within)
    beginning, *rest = found["prompt_logprobs"]
    assert beginning is None
    assert near(rest, found["logprobs"][0], within)
    experts = {name for name in found["metrics"] if name.startswith("e_")}
    settings = HYBRIDS.get(family, {})
    mixture = family in MIXTURES or "num_experts" in settings or "n_routed_experts" in settings
    assert experts == (EXPERT_METRICS if mixture else set())


def check_merged_metrics(found: dict[str, Any]) -> None:
    """The SDK merges means by the number of data, and a maximum is that of all parts."""
    parts, merged = found["parts"], found["merged"]
    counts = [part["tokens:sum"] for part in parts]
    for name in EXPERT_METRICS:
        values = [part[name] for part in parts]
        if name.endswith(":max"):
            expected = max(values)
        else:
            expected = sum(
                value * count for value, count in zip(values, counts, strict=True)
            ) / sum(counts)
        assert math.isclose(merged[name], expected, rel_tol=1e-9), name

"""How evenly the tokens of a request were spread over the experts."""

from __future__ import annotations

from torch import Tensor

# L layers with experts, E experts of a layer


def expert_metrics(counts_LE: Tensor) -> dict[str, float]:
    """
    The metrics of a mixture, from how often each expert was chosen, with Tinker's names.

    A violation is how far the most or the least loaded expert of a layer is from an even load, as a
    fraction of that load.
    """
    counts_LE = counts_LE.double()
    fair_L1 = counts_LE.mean(dim=1, keepdim=True).clamp(min=1e-9)
    most_L = (counts_LE.amax(dim=1, keepdim=True) - fair_L1) / fair_L1
    least_L = (fair_L1 - counts_LE.amin(dim=1, keepdim=True)) / fair_L1
    return {
        "e_frac_with_tokens:mean": float((counts_LE > 0).double().mean()),
        "e_frac_oversubscribed:mean": float((counts_LE > fair_L1).double().mean()),
        "e_max_violation:mean": float(most_L.mean()),
        "e_max_violation:max": float(most_L.max()),
        "e_min_violation:mean": float(least_L.mean()),
    }

"""Finds the mixtures of a model, gives them the engine's code, and compares their routing at start."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from tinkex.engine.model import experts
from tinkex.engine.model.experts import Experts, RoutedTokens
from tinkex.engine.model.lora import AdapterContext
from tinkex.engine.model.targets import Target, text_name
from tinkex.engine.model.unsupported import UnsupportedModel

#: Keys of a config that say how many experts a layer has.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

#: At start at least this share of the router's choices must be those of the original model. Rounding
#: flips near ties; a router with a wrong input would agree in few.
MIN_AGREEMENT = 0.75


def expert_count(config: PretrainedConfig) -> int:
    """The experts of a layer; 0 for a dense model. Some configs have a list, layer by layer."""
    text = config.get_text_config()
    found = [getattr(text, key, None) or 0 for key in COUNTS]
    return max(max(each) if isinstance(each, list) else int(each) for each in found)


def check_version(config: PretrainedConfig) -> None:
    """Raises `UnsupportedModel` if transformers is too old for mixtures of experts."""
    numbers = re.findall(r"\d+", transformers.__version__)[:2]
    if tuple(map(int, numbers)) < experts.NEEDED_TRANSFORMERS:
        needed = ".".join(map(str, experts.NEEDED_TRANSFORMERS))
        raise UnsupportedModel(
            f"{config.model_type} is a mixture of experts, which needs transformers {needed} or "
            f"later; {transformers.__version__} is installed. Run "
            f"`pip install 'transformers>={needed}'`."
        )


def replace_experts(model: Any, context: AdapterContext) -> tuple[list[Experts], list[Target]]:
    """Makes transformers call the engine's code for experts. Call it when the weights are placed."""
    found = []
    for name, module in experts_modules(model).items():
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModel(
                f"the experts of {model.config.model_type} models end with a norm of their own, "
                "which this engine does not support. Serve another model."
            )
        module.tinkex_experts = Experts(module, name, context)
        found.append(module.tinkex_experts)
    if not found:
        if expert_count(model.config):
            raise UnsupportedModel(
                f"{model.config.model_type} is a mixture of experts whose code in transformers has "
                "no interface for experts, so they cannot be adapted. Serve another model."
            )
        return [], []
    transformers.integrations.moe.ExpertsInterface.register(experts.NAME, experts.run_module)
    model.set_experts_implementation(experts.NAME)
    return found, [target for each in found for target in each.weights.targets(each.name)]


def experts_modules(model: Any) -> dict[str, Any]:
    return {
        text_name(name): each for name, each in model.named_modules() if experts.is_experts(each)
    }


@contextlib.contextmanager
def recorded_routing(model: Any) -> Iterator[dict[str, RoutedTokens]]:
    """Records what the routers choose while the original model runs."""
    routed: dict[str, RoutedTokens] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> None:
            index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            weights = kwargs["top_k_weights"] if "top_k_weights" in kwargs else args[2]
            routed[name] = RoutedTokens(0, index, weights)

        return hook

    handles = [
        module.register_forward_pre_hook(record(name), with_kwargs=True)
        for name, module in experts_modules(model).items()
    ]
    try:
        yield routed
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def replayed_routing(
    found: Sequence[Experts], routed: Mapping[str, RoutedTokens], start: int
) -> Iterator[None]:
    """
    Tokens from `start` on go through recorded experts, so that the results can be compared.

    The original code and the engine's round differently, and an expert of a near tie may flip.
    """
    for each in found:
        each.replayed = routed[each.name]._replace(start=start)
    try:
        yield
    finally:
        for each in found:
            each.replayed = None


def agreement(found: Sequence[Experts], routed: Mapping[str, RoutedTokens], start: int) -> float:
    """The share of the routers' choices in the last pass that are equal to the recorded ones."""
    shares = []
    for each in found:
        assert each.routed_TK is not None
        ours_TK, theirs_TK = each.routed_TK[start:], routed[each.name].index_TK
        equal_TKK = ours_TK.unsqueeze(2) == theirs_TK.unsqueeze(1)
        shares.append(equal_TKK.any(dim=2).float().mean())
    return float(torch.stack(shares).mean()) if shares else 1.0


def counted(found: Sequence[Experts], lengths: Sequence[int]) -> Tensor | None:
    """
    How often each expert was chosen in the last pass, [parts, layers, experts].

    `lengths` are the tokens of adjacent parts of the pass. None for a dense model.
    """
    routed = [each.routed_TK for each in found if each.routed_TK is not None]
    if not routed:
        return None
    index_LTK = torch.stack(routed)
    layers, experts_each = len(routed), max(len(each.weights.in_EHO) for each in found)
    parts_T = torch.repeat_interleave(torch.tensor(lengths)).to(index_LTK.device)
    layers_L11 = torch.arange(layers, device=index_LTK.device)[:, None, None]
    places = (parts_T[:, None] * layers + layers_L11) * experts_each + index_LTK
    counts = torch.zeros(
        len(lengths) * layers * experts_each, dtype=torch.long, device=index_LTK.device
    )
    counts.scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())
    return counts.view(len(lengths), layers, experts_each)

"""Adapters in the layouts that PEFT and vLLM read, where these differ from Tinker's.

Neither knows a factor that all experts share, so the exported adapter has a copy of it for each
expert and is several times as large. `expert_files` describes the layouts. Projections that the
model makes with one linear layer get one pair, whose rank is the sum of theirs. The result of the
model is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tinkex.engine.adapters.checkpoints import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    SavedAdapter,
    fitted_layout,
    read_adapter,
)
from tinkex.engine.adapters.expert_files import DOWN, IN, OWN_PARTS, Pair, Pairs
from tinkex.engine.model.base_model import adapted
from tinkex.engine.model.experts import Experts
from tinkex.engine.model.lora import AdapterContext, LoraLinear
from tinkex.engine.model.original_model import without_weights
from tinkex.engine.model.recurrent_layers import is_mamba
from tinkex.engine.model.targets import text_name
from tinkex.wire.errors import UserFailure

# E experts, R rank, O outputs of gate and up together

#: Models whose experts vLLM reads as a pair for each, and as PEFT's pairs of all experts.
VLLM_ONE_EACH = frozenset({"qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe"})
VLLM_ALL = frozenset({"gpt_oss"})

#: The layers of vision towers, as a pattern for PEFT.
TOWER_LAYERS = r".*\.visual\..*"


class _Exported(NamedTuple):
    pairs: Pairs
    #: Changes of the adapter's config.
    config: dict[str, Any]


def export_adapter(source: Path, target: Path, base: Path, form: str) -> None:
    """
    Writes the weights in folder `source` to `target`, as "peft" or "vllm" reads them.

    `base` is the folder of the base model, of which only the config is read. The adapter's config
    is in `target` already, and changed.
    """
    model = without_weights(base)
    targets, experts = adapted(model, AdapterContext())
    saved = read_adapter(source, [each.name for each in targets])
    fitted_layout(targets, saved, source)
    family = model.config.get_text_config().model_type
    if form == "peft" and any(map(is_mamba, model.modules())):
        raise UserFailure(
            "PEFT opens no adapter that changes the output projection of Mamba layers. Use --as hf: "
            "a full model."
        )
    if not experts and not joint_layers(model):
        exported = _Exported(dict(saved.pairs), {"target_modules": _leaves(saved.pairs)})
    elif form == "peft":
        exported = for_peft(saved, experts, joint_layers(model))
    elif family in VLLM_ONE_EACH:
        exported = one_pair_each(saved.pairs)
    elif family in VLLM_ALL:
        exported = for_vllm(saved, experts)
    else:
        known = ", ".join(sorted(VLLM_ONE_EACH | VLLM_ALL))
        raise UserFailure(
            f"how vLLM reads such an adapter is known for {known}, not for {family}. Use --as hf: "
            "a full model, which vLLM reads if it knows the family."
        )
    config: dict[str, Any] = json.loads((target / CONFIG).read_text())
    for key in ("rank_pattern", "alpha_pattern", "target_parameters"):
        config.pop(key, None)
    if _decoder_path(model) != text_name(_decoder_path(model)):
        # Its layers have the names of layers that are adapted.
        config["exclude_modules"] = TOWER_LAYERS
    config |= {"r": saved.rank, "lora_alpha": _plain(saved.scale * saved.rank)}
    (target / CONFIG).write_text(json.dumps(config | exported.config, indent=2) + "\n")
    decoder = _decoder_path(model)
    tensors = {
        f"{PREFIX}{_full_name(name, decoder)}.lora_{letter}.weight": matrix.contiguous().clone()
        for name, pair in exported.pairs.items()
        for letter, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})


def _decoder_path(model: Any) -> str:
    """The path of the decoder's layers in a model, which may have a vision tower beside them."""
    layers = model.get_decoder().layers
    return str(next(name for name, module in model.named_modules() if module is layers))


def _full_name(name: str, decoder: str) -> str:
    """The name of a layer in the whole model: adapters leave `language_model.` out."""
    short = text_name(decoder)
    return decoder + name.removeprefix(short) if name.startswith(f"{short}.") else name


def _plain(number: float) -> float:
    """A whole number without a point, as PEFT writes it."""
    return int(number) if number == int(number) else number


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _leaves(names: Iterable[str]) -> list[str]:
    return sorted({_leaf(name) for name in names})


def _below_layer(name: str) -> str:
    """The end of a name that is the same in all layers."""
    return re.split(r"\.\d+\.", name, maxsplit=1)[-1]


# -- a pair for each expert -----------------------------------------------------------------------


def one_pair_each(pairs: Pairs) -> _Exported:
    """With the names of an expert's projections."""
    projections = {own: projection for projection, own in OWN_PARTS.items()}
    found: dict[str, Pair] = {}
    for name, (A, B) in pairs.items():
        if A.dim() == B.dim():
            found[name] = (A, B)
            continue
        path, _, part = name.rpartition(".")
        for expert in range(len(A) if A.dim() == 3 else len(B)):
            own = tuple(each[expert] if each.dim() == 3 else each for each in (A, B))
            found[f"{path}.{expert}.{projections[part]}"] = (own[0], own[1])
    return _Exported(found, {"target_modules": _leaves(found)})


# -- a pair of all experts ------------------------------------------------------------------------


def for_peft(
    saved: SavedAdapter, experts: Iterable[Experts], joint: Iterable[LoraLinear] = ()
) -> _Exported:
    """With `target_parameters`; gate and up together have twice the rank of other layers."""
    plain, stacks, ranks = _stacked(saved, experts)
    parameters = [*ranks]
    for layer in joint:
        own = {name: plain.pop(name) for name in layer.projections if name in plain}
        if own:
            plain[layer.name] = _joined(layer, own, saved.rank)
            ranks[_leaf(layer.name)] = len(own) * saved.rank
    # PEFT takes a module of such a name for the experts, even a dense layer or a shared expert.
    linear = [name for name in plain if _leaf(name) in OWN_PARTS]
    parameters += sorted({f"{_below_layer(name)}.weight" for name in linear})
    alpha = _plain(saved.scale * saved.rank)
    more = {name: rank // saved.rank for name, rank in ranks.items() if rank != saved.rank}
    return _Exported(
        plain | stacks,
        {
            "target_modules": _leaves(plain.keys() - linear),
            "target_parameters": parameters,
            "rank_pattern": {name: times * saved.rank for name, times in more.items()},
            "alpha_pattern": {name: times * alpha for name, times in more.items()},
        },
    )


def joint_layers(model: Any) -> list[LoraLinear]:
    """The linear layers that make several projections, each with a pair of its own."""
    linears = (each for each in model.modules() if isinstance(each, LoraLinear))
    return [linear for linear in linears if len(linear.projections) > 1]


def _joined(layer: LoraLinear, pairs: Pairs, rank: int) -> Pair:
    """One pair for all projections: an A over the other, and zeros where B meets another's A."""
    first = next(iter(pairs.values()))[1]
    B_OR = first.new_zeros(len(layer.weight), len(pairs) * rank)
    for at, (name, (_, B)) in enumerate(pairs.items()):
        columns = layer.projections[name]
        assert columns is not None
        own = columns.of(B_OR)[:, :, at * rank : (at + 1) * rank]
        own.copy_(B.view_as(own))
    return torch.cat([A for A, _ in pairs.values()]), B_OR


def for_vllm(saved: SavedAdapter, experts: Iterable[Experts]) -> _Exported:
    """The same with one rank for all layers, the largest: others get zeros."""
    plain, stacks, parameters = _stacked(saved, experts)
    rank = max(parameters.values(), default=saved.rank)
    count = {name: len(A) // saved.rank for name, (A, _) in stacks.items() if name.endswith(DOWN)}
    padded = {name: _padded(pair, 1, rank) for name, pair in plain.items()}
    for name, pair in stacks.items():
        padded[name] = _padded(pair, count[name.removesuffix(".base_layer")], rank)
    config = {
        "r": rank,
        "lora_alpha": _plain(saved.scale * rank),
        "target_modules": _leaves(plain),
        "target_parameters": [*parameters],
    }
    return _Exported(padded, config)


def _stacked(
    saved: SavedAdapter, experts: Iterable[Experts]
) -> tuple[dict[str, Pair], dict[str, Pair], dict[str, int]]:
    """The pairs of linear layers, those of all experts, and the ranks by parameter."""
    plain = {name: pair for name, pair in saved.pairs.items() if pair[0].dim() == pair[1].dim()}
    stacks: dict[str, Pair] = {}
    parameters: dict[str, int] = {}
    for each in experts:
        count, _, outputs = each.weights.in_EHO.shape
        own = {
            part: saved.pairs.get(f"{each.name}.{part}") for part in (*each.weights.columns, "w2")
        }
        if not any(pair is not None for pair in own.values()):
            continue
        path = each.name.removesuffix(DOWN)
        A_parts: list[Tensor] = []
        B_parts: list[Tensor] = []
        for part, columns in each.weights.columns.items():
            pair = own[part]
            if pair is None:
                raise UserFailure(f"the adapter has no matrices for {each.name}.{part}.")
            A_parts.append(pair[0])
            B_EOR = pair[1].new_zeros(count, outputs, saved.rank)
            B_EOR[:, columns] = pair[1]
            B_parts.append(B_EOR)
        if own["w2"] is None:
            raise UserFailure(f"the adapter has no matrices for {each.name}.w2.")
        A_ERI, B_OR = own["w2"]
        stacks[path + IN] = _flat(torch.cat(A_parts).expand(count, -1, -1), torch.cat(B_parts, 2))
        stacks[path + DOWN] = _flat(A_ERI, B_OR.expand(count, -1, -1))
        short = _below_layer(each.name)
        first = "gate_up_proj" if len(A_parts) == 2 else "up_proj"
        parameters[f"{short}.{first}"] = len(A_parts) * saved.rank
        parameters[f"{short}.down_proj"] = saved.rank
    return plain, stacks, parameters


def _flat(A_ERI: Tensor, B_EOR: Tensor) -> Pair:
    """A expert by expert; the columns of B rank by rank."""
    return A_ERI.reshape(-1, A_ERI.shape[2]), B_EOR.permute(1, 2, 0).reshape(B_EOR.shape[1], -1)


def _padded(pair: Pair, count: int, rank: int) -> Pair:
    """The pair of `count` experts with zeros up to a rank; their product stays the same."""
    A, B = pair
    more = rank - len(A) // count
    A_ERI, B_ORE = A.reshape(count, -1, A.shape[1]), B.reshape(len(B), -1, count)
    A_ERI, B_ORE = (F.pad(each, (0, 0, 0, more)) for each in (A_ERI, B_ORE))
    return A_ERI.flatten(0, 1), B_ORE.flatten(1, 2)

"""Loads the part of a model that one rank has, by the plan of transformers.

The plan names the linear layers that are divided by outputs (`colwise`) and by inputs (`rowwise`).
Each rank reads only its rows or columns of them from the files (of experts: `expert_parts`). The
embedding is whole on each rank, and so are norms, but for those over all heads.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from tinkex.engine.model import experts, original_model
from tinkex.engine.model.model_shape import NOT_TEXT
from tinkex.engine.model.recurrent_layers import is_recurrent
from tinkex.engine.model.recurrent_shape import head_counts
from tinkex.engine.model.targets import HEAD, text_name
from tinkex.engine.model.unsupported import UnsupportedModel, quantization_method
from tinkex.engine.ranks import recurrent_parts
from tinkex.engine.ranks.divided_shape import BY_KEY_HEADS, heads_fit, key_parts
from tinkex.engine.ranks.expert_parts import (
    ExpertReader,
    Part,
    divide_experts,
    forms_of,
    layer_of,
)
from tinkex.engine.ranks.fp8_parts import SCALES, Fp8Slice, find_scales
from tinkex.engine.ranks.layers import NormOverHeads
from tinkex.engine.ranks.plans import PACKED_GATE, PACKED_HEADS, WHOLE, Plan
from tinkex.engine.ranks.process_group import ProcessGroup, own_range
from tinkex.engine.ranks.shard import Division, Section, Shard
from tinkex.models.weight_file_checks import (
    check_complete,
    check_fp8_blocks,
    check_layers,
    check_weight_files,
    tensor_names,
    weight_files,
)

#: Norms of queries and keys, with what they are divided like if they are over all heads.
NORMS = {"q_norm": "q_proj", "k_norm": "k_proj"}

_IN_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+)\.(weight|bias)$")


def load_shard(
    folder: Path, dtype: torch.dtype, device: torch.device, group: ProcessGroup
) -> tuple[Any, Shard]:
    """The model of transformers with the layers of this rank. Raises `UnsupportedModel`."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    original_model.refuse_unsupported(config)
    refuse_undivided(config, folder, group.size)
    check_weight_files(folder, config.to_dict())
    count = config.get_text_config().num_hidden_layers
    check_layers(count, {*tensor_names(folder)}, folder)
    quantization: Any = getattr(config, "quantization_config", None)
    if quantization_method(quantization) == "fp8":
        check_fp8_blocks(folder, quantization)
    auto = original_model.auto_class(config, folder)
    family: Any = auto._model_mapping[type(config)]
    attention = original_model.original_attention(config, auto)
    if family.config_class is type(config.get_text_config()):
        config = config.get_text_config()  # the part of a model with images that reads text
    with torch.device("meta"):
        whole = family(config)
        names = {part for name, _ in whole.named_parameters() for part in name.split(".")}
        blocks = recurrent_parts.blocks_of(whole)
        forms = forms_of(whole)
        divisions = divide(whole, group.rank, group.size)
    shard = Shard(group, divisions)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what is read has plain numbers
    unused = NOT_TEXT - names

    def __init__(self: Any, config: PretrainedConfig) -> None:
        family.__init__(self, config)
        divide(self, group.rank, group.size)

    straight = device.type == "cuda" and importlib.util.find_spec("accelerate") is not None
    reader = ExpertReader(
        forms,
        rank=group.rank,
        ranks=group.size,
        dtype=dtype,
        device=device if straight else torch.device("cpu"),
    )
    parts = find_parts(folder, shard, reader, layers=count, unused=unused, blocks=blocks)
    # transformers makes the model without memory and then fills it; here, with smaller layers.
    smaller: Any = type(
        family.__name__, (family,), {"__init__": __init__, "__module__": family.__module__}
    )
    with original_model.quiet_transformers():
        model, found = smaller.from_pretrained(
            None,
            config=config,
            state_dict=parts,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            device_map={"": device} if straight else None,
        )
    check_complete(found["missing_keys"], folder)
    return model, shard


def refuse_undivided(config: PretrainedConfig, folder: Path, ranks: int) -> None:
    """Raises `UnsupportedModel` for models that are served on one GPU only."""
    one = "Serve it on one GPU (--gpus-per-replica 1)."
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(f"only safetensors can be divided over {ranks} GPUs. {one}")
    text = config.get_text_config()
    if not Plan(text):
        raise UnsupportedModel(
            f"transformers has no plan that divides {config.model_type} models over {ranks} GPUs. "
            f"{one}"
        )
    heads, keys, recurrent = text.num_attention_heads, key_heads(text), head_counts(text.to_dict())

    def fits(ranks: int) -> bool:
        return heads_fit(heads, keys, ranks) and not any(
            count % ranks for count in recurrent.values()
        )

    if not fits(ranks):
        counts = {"attention heads": heads, "key heads": keys, **recurrent}
        *others, last = (f"{count} {name}" for name, count in counts.items())
        which = f"{', '.join(others)} and {last}"
        fitting = [str(count) for count in range(1, heads + 1) if fits(count)]
        raise UnsupportedModel(
            f"a model with {which} cannot be divided over {ranks} GPUs. Use --gpus-per-replica "
            f"{' or '.join(fitting)}."
        )


def key_heads(text_config: Any) -> int:
    found: int = (
        getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    )
    return found


def divide(model: Any, rank: int, ranks: int) -> dict[str, Division]:
    """Replaces the linear layers by those of a rank, without weights. Raises `UnsupportedModel`."""
    text = model.config.get_text_config()
    plan = Plan(text)
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise UnsupportedModel(
            f"transformers' code for {model.config.model_type} models has no decoder attribute "
            "`layers`. Serve another model."
        )
    prefix = text_name(next(name for name, module in model.named_modules() if module is layers))
    divisions: dict[str, Division] = {}

    for path, module in list(layers.named_modules()):
        if is_recurrent(module):
            divisions |= recurrent_parts.divide(module, f"{prefix}.{path}", ranks)
        if experts.is_experts(module):
            first = "gate_up_proj" if module.has_gate else "up_proj"
            styles = plan.style(f"{path}.{first}"), plan.style(f"{path}.down_proj")
            if styles not in (("packed_colwise", "rowwise"), ("colwise", "rowwise")):
                raise UnsupportedModel(
                    f"the plan of transformers for {model.config.model_type} models does not "
                    f"divide their experts ({styles[0] or 'not named'}). Serve it on one GPU "
                    "(--gpus-per-replica 1)."
                )
            divisions |= divide_experts(module, f"{prefix}.{path}", ranks)
        if isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):
            module.sinks = nn.Parameter(sinks.new_empty(len(sinks) // ranks))
        parent_path, _, leaf = path.rpartition(".")
        parent = layers.get_submodule(parent_path)
        if leaf in NORMS and len(module.weight) != parent.head_dim:
            by = divisions[f"{prefix}.{parent_path}.{NORMS[leaf]}"]
            divisions[f"{prefix}.{path}"] = by
            _replace(layers, path, NormOverHeads(module, by, rank, ranks))
        if not isinstance(module, nn.Linear) or is_recurrent(parent):  # which is divided above
            continue
        style = plan.style(path)
        if style == WHOLE:
            continue
        division = _division(style, leaf, module, text, ranks)
        if division is None:
            raise UnsupportedModel(
                f"the plan of transformers for {model.config.model_type} models does not divide "
                f"{path.partition('.')[2]} ({style or 'not named'}). Serve it on one GPU "
                "(--gpus-per-replica 1)."
            )
        if any(section.size % (section.parts or ranks) for section in division.sections):
            raise UnsupportedModel(
                f"{prefix}.{path} has {division.size} "
                f"{'inputs' if division.letter == 'A' else 'outputs'}, which {ranks} GPUs cannot "
                "divide. Use another --gpus-per-replica."
            )
        divisions[f"{prefix}.{path}"] = division
        own = division.own_size(rank, ranks)
        by_inputs = division.letter == "A"
        sizes = (own, module.out_features) if by_inputs else (module.in_features, own)
        _replace(layers, path, _linear(*sizes, module))
        if style == PACKED_HEADS:
            # This code counts heads; that of other families follows from the sizes.
            parent.num_key_value_heads //= key_parts(key_heads(text), ranks)
            parent.config = _ConfigOfRank(parent.config, ranks)
    head = model.get_output_embeddings()
    divisions[HEAD] = Division.of("B", head.out_features)
    if not model.config.tie_word_embeddings:
        start, stop = own_range(head.out_features, rank, ranks)
        model.set_output_embeddings(_linear(head.in_features, stop - start, head))
    return divisions


def _division(
    style: str | None, leaf: str, module: nn.Linear, text_config: Any, ranks: int
) -> Division | None:
    """How a layer is divided; None if its style is not one that is known here."""
    outputs, keys = module.out_features, key_heads(text_config)
    # With as many ranks as key heads, or fewer, each has its own.
    parts = key_parts(keys, ranks) if keys < ranks else None
    if style == "rowwise":
        return Division.of("A", module.in_features)
    if style == "colwise":
        return Division("B", (Section(outputs, parts if leaf in BY_KEY_HEADS else None),))
    if style == PACKED_GATE:
        return Division.of("B", outputs // 2, outputs // 2)
    if style == PACKED_HEADS:
        each = outputs // (text_config.num_attention_heads + 2 * keys) * keys
        shared = Section(each, parts)
        return Division("B", (Section(outputs - 2 * each), shared, shared))
    return None


class _ConfigOfRank:
    """A config with the number of attention heads of one rank."""

    def __init__(self, config: Any, ranks: int) -> None:
        self._config = config
        self.num_attention_heads = config.num_attention_heads // ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _linear(inputs: int, outputs: int, like: nn.Linear) -> nn.Linear:
    return nn.Linear(
        inputs,
        outputs,
        bias=like.bias is not None,
        device=like.weight.device,
        dtype=like.weight.dtype,
    )


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


def find_parts(
    folder: Path,
    shard: Shard,
    of_experts: ExpertReader,
    *,
    layers: int,
    unused: Collection[str] = (),
    blocks: recurrent_parts.Blocks | None = None,
) -> dict[str, Part]:
    """
    The tensors of this rank, of divided layers only its part, which transformers then reads.

    Those of `unused` parts of the model, and of more layers than this many, which only predict
    further tokens, are left out. `blocks` are those of the rows of recurrent layers.
    """
    blocks = blocks or {}
    by_layer = {
        match[1]: division
        for name, division in shard.divisions.items()
        if (match := _IN_LAYER.search(f"{name}.weight")) is not None
    }
    scales = find_scales(folder)
    found: dict[str, Part] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for key in [*opened.keys()]:
                parts = set(key.split("."))
                if not parts.isdisjoint(unused) or key.endswith(SCALES):
                    continue
                if parts.isdisjoint(NOT_TEXT) and (layer_of(key) or 0) >= layers:
                    continue
                # Layers for images may be called like those of the text.
                match = _IN_LAYER.search(key) if parts.isdisjoint(NOT_TEXT) else None
                division = None if match is None else by_layer.get(match[1])
                kind = key.rpartition(".")[2]
                whole = opened.get_slice(key)
                if key in scales:
                    whole = Fp8Slice(whole, scales[key], key)
                if parts.isdisjoint(NOT_TEXT) and of_experts.add(whole, key):
                    continue
                if kind == "sinks":  # one for each head
                    division = Division.of("B", *whole.get_shape())
                if match is None and key.rpartition(".")[0].rpartition(".")[2] in HEADS:
                    division = shard.divisions[HEAD]
                rows = blocks.get(recurrent_parts.part_of_layer(key))
                if rows is not None and parts.isdisjoint(NOT_TEXT):
                    found[key] = Part(recurrent_parts.own_rows, whole, rows, shard.group)
                else:
                    found[key] = Part(_read, whole, kind, division, shard)
    return found | of_experts.parts(folder)


#: The last parts of names of output projections.
HEADS = frozenset({"lm_head", "embed_out"})


def _read(whole: Any, kind: str, division: Division | None, shard: Shard) -> Tensor:
    """`whole` is a tensor in its file."""
    tensor: Tensor
    if division is None or (division.letter == "A" and kind == "bias"):
        tensor = whole[:]
        return tensor
    ranges = shard.ranges_of(division)
    if division.letter == "A":
        return torch.cat([whole[:, start:stop] for start, stop in ranges], dim=1)
    # Rows may be a view of the whole tensor.
    return torch.cat([whole[start:stop] for start, stop in ranges])

"""The check at start of a divided model: its first layers against transformers' code for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PretrainedConfig

from tinkex.engine.model import model_experts, original_model, start_check
from tinkex.engine.model.start_check import Probe
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.model.vision_tower import VisionTower
from tinkex.engine.ranks.process_group import ProcessGroup

if TYPE_CHECKING:
    from tinkex.engine.model.base_model import BaseModel


def compared_layers(config: PretrainedConfig) -> int:
    """The first layers, until each kind of layer has been among them."""
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    last = max((kinds.index(kind) for kind in kinds), default=0)
    dense = int(getattr(text, "first_k_dense_replace", None) or 0)
    return min(int(text.num_hidden_layers), max(last + 1, dense + 1, 2))


def original_probes(
    folder: Path, dtype: torch.dtype, device: torch.device, layers: int, *, images: bool
) -> list[Probe]:
    """What transformers computes with the first layers, whole. The tensors are in host memory."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    options: dict[str, Any] = {}
    if (dequantized := original_model.dequantization(config)) is not None:
        options["quantization_config"] = dequantized
    auto = original_model.auto_class(config, folder)
    with original_model.quiet_transformers():
        model = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=original_model.original_attention(config, auto),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **options,
        )
    original_model.convert_experts(model, dtype)
    model = model.to(device).eval()
    probes = Probe.all_of(model, VisionTower(model) if images else None)
    return [probe.to(torch.device("cpu")) for probe in probes]


def check_first_layers(model: BaseModel, folder: Path, group: ProcessGroup) -> None:
    """
    Compares the first layers of all ranks with transformers' code for them, which rank 0 runs whole.

    Raises `UnsupportedModel`. A whole model would not fit: that is why it is divided.
    """
    count = compared_layers(model.config)
    images = model.vision is not None
    probes = group.agree(
        lambda: original_probes(folder, model.dtype, model.device, count, images=images)
    )
    for probe in probes:
        _check_probe(model, probe.to(model.device), count, group)


def _check_probe(model: BaseModel, probe: Probe, count: int, group: ProcessGroup) -> None:
    compared = [each for each in model.experts if each.name in probe.routed]
    with model_experts.replayed_routing(compared, probe.routed, 0):
        found_TV = model.first_layers_logits(count, probe)
    model.check_positions(probe)

    def decide() -> float:
        assert probe.expected_TV is not None
        return start_check.relative_gap(found_TV, probe.expected_TV)

    gap = group.agree(decide)
    if not gap < start_check.TOLERANCE[model.dtype]:  # NaN is refused too
        raise UnsupportedModel(
            f"{group.size} ranks do not compute {model.config.model_type} models correctly (the "
            f"logits of the first {count} layers differ by {gap:.1e}). Serve it on one GPU "
            "(--gpus-per-replica 1)."
        )

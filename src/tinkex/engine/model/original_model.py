"""The models of transformers, loaded from a folder of which nothing is run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from tinkex.engine.model import model_experts
from tinkex.engine.model.image_models import IMAGE_TYPES, has_tower
from tinkex.engine.model.unsupported import (
    UnsupportedModel,
    quantization_method,
    refuse_quantization,
)
from tinkex.models.weight_file_checks import (
    check_complete,
    check_fp8_blocks,
    check_layers,
    check_weight_files,
    tensor_names,
)


def load(
    folder: Path, dtype: torch.dtype, *, device: torch.device | None = None
) -> PreTrainedModel:
    """The original transformers model: on the CPU, or safetensors straight on a device."""
    # Never run code or pickles from a model folder.
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    refuse_unsupported(config)
    check_weight_files(folder, config.to_dict())
    # Without quantization, nothing is passed: None would hide the one of the folder.
    options: dict[str, Any] = {}
    if (dequantized := dequantization(config)) is not None:
        if isinstance(dequantized, FineGrainedFP8Config):
            check_fp8_blocks(folder, config.quantization_config)
        options["quantization_config"] = dequantized
    model: PreTrainedModel
    found: dict[str, Any]
    auto = auto_class(config, folder)
    ggufs = sorted(folder.glob("*.gguf"))
    with quiet_transformers():
        if ggufs and not any(folder.glob("*.safetensors")):
            return load_gguf(ggufs[0], config, dtype)
        layers = config.get_text_config().num_hidden_layers
        check_layers(layers, {*tensor_names(folder)}, folder)
        try:
            model, found = auto.from_pretrained(
                folder,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation=original_attention(config, auto),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                device_map=None if device is None else {"": device},
                **options,
            )
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            raise UnsupportedModel(
                f"transformers' code for {config.model_type} models does not support custom "
                "attention functions. Serve another model."
            ) from None
    check_complete(found["missing_keys"], folder)
    convert_experts(model, dtype)
    return model


def convert_experts(model: Any, dtype: torch.dtype) -> None:
    """Those of MXFP4 are bfloat16 in transformers, whatever it was asked for."""
    for module in model_experts.experts_modules(model).values():
        module.to(dtype)


def load_gguf(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from tinkex.models.gguf import hf_tensors, read_gguf

    tensors = {
        name: torch.from_numpy(array).to(dtype) for name, array in hf_tensors(read_gguf(path))
    }
    check_layers(config.get_text_config().num_hidden_layers, tensors.keys(), path.parent)
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: PreTrainedModel
    found: dict[str, Any]
    model, found = family.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    check_complete(found["missing_keys"], path.parent)
    return model


def auto_class(config: PretrainedConfig, folder: Path) -> Any:
    """Which class of transformers loads a folder: the one with a vision tower only if it is used."""
    if has_tower(config.to_dict(), folder) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def original_attention(config: PretrainedConfig, auto: Any) -> str:
    """The attention of transformers with which logits are compared."""
    family: Any = auto._model_mapping[type(config)]
    # gpt-oss and Gemma 2 have more in their attention than the faster function computes.
    return "eager" if family._supports_attention_backend and not family._supports_sdpa else "sdpa"


def dequantization(config: PretrainedConfig) -> Mxfp4Config | FineGrainedFP8Config | None:
    """How quantized weights are loaded: training and the kernels need them in 16 or 32 bits."""
    method = quantization_method(getattr(config, "quantization_config", None))
    by_method = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    return None if method is None else by_method[method](dequantize=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disables the progress bar: the server's stderr is a log."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def refuse_unsupported(config: PretrainedConfig) -> None:
    refuse_quantization(getattr(config, "quantization_config", None))
    # Not in its keys(): they would import the configuration modules of all model families.
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in IMAGE_TYPES:
        images = getattr(config, "vision_config", None) is not None
        what = "takes images" if images else "is not a decoder-only language model"
        raise UnsupportedModel(
            f"{config.model_type} {what}, and transformers does not load it as a causal language "
            "model; this engine serves text only. Serve a text model, or the saved text part."
        )
    if model_experts.expert_count(config):
        model_experts.check_version(config)


def eos_token_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    """End-of-turn tokens from generation_config.json, or from config.json without that."""
    found: Any = None
    file = folder / "generation_config.json"
    if file.exists():
        found = json.loads(file.read_text()).get("eos_token_id")
    if found is None:
        found = config.get_text_config().eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def without_weights(folder: Path) -> Any:
    """The model of a folder with the shapes of its weights only."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    refuse_unsupported(config)
    with torch.device("meta"):
        return auto_class(config, folder).from_config(config)

"""The refusal of a base model."""

from __future__ import annotations

from typing import Any

#: Methods of quantization whose weights are loaded as plain numbers.
DEQUANTIZED = ("fp8", "mxfp4")


class UnsupportedModel(ValueError):
    """The folder holds a model that this engine cannot compute correctly."""


def quantization_method(found: Any) -> str | None:
    """The method that a `quantization_config` of config.json names; None without one."""
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def refuse_quantization(found: Any) -> None:
    """Raises `UnsupportedModel` for quantized weights that are not loaded as plain numbers."""
    method = quantization_method(found)
    if method is not None and method not in DEQUANTIZED:
        raise UnsupportedModel(
            f"the weights are quantized ({method}). Of quantized weights, the engine reads "
            f"{' and '.join(DEQUANTIZED)}, as plain numbers. Serve the folder of the model in "
            "bfloat16."
        )

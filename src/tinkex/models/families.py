"""Which model families are served, and why others are not. The tests train and sample each of them.

A family is called as its classes in transformers; `types` are the `model_type` of its configs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    name: str
    types: tuple[str, ...]
    notes: str = ""
    served: bool = True
    #: Whether a model may be divided over several GPUs.
    divided: bool = False


MIXTURE = "mixture of experts"
IMAGES = "reads text and images"

FAMILIES = (
    Family("Llama", ("llama",), "also SmolLM, SmolLM2 and TinyLlama", divided=True),
    Family("Qwen2", ("qwen2",), "biases in attention; also Qwen2.5", divided=True),
    Family("Qwen3", ("qwen3",), "norms of queries and keys", divided=True),
    Family("SmolLM3", ("smollm3",), "some layers without positions", divided=True),
    Family("Mistral", ("mistral",), "sliding windows", divided=True),
    Family("Gemma", ("gemma",), divided=True),
    Family("Gemma2", ("gemma2",), "sliding windows, soft caps", divided=True),
    Family("Gemma3Text", ("gemma3_text", "gemma3"), "sliding windows; text only", divided=True),
    Family("Phi", ("phi",), divided=True),
    Family(
        "Phi3",
        ("phi3",),
        "fused projections: one adapter for query, key and value; also Phi 4",
        divided=True,
    ),
    Family("GPTNeoX", ("gpt_neox",), "Pythia", divided=True),
    Family("Olmo2", ("olmo2",), divided=True),
    Family("Granite", ("granite",), "refused if `logits_scaling` is not 1", divided=True),
    Family("Glm4", ("glm4",), "fused projections", divided=True),
    Family("Starcoder2", ("starcoder2",), divided=True),
    Family("Qwen3Moe", ("qwen3_moe",), MIXTURE, divided=True),
    Family("Mixtral", ("mixtral",), MIXTURE, divided=True),
    Family("Olmoe", ("olmoe",), MIXTURE, divided=True),
    Family(
        "Qwen2Moe", ("qwen2_moe",), f"{MIXTURE}, one of them shared by all tokens", divided=True
    ),
    Family("Glm4Moe", ("glm4_moe",), f"{MIXTURE}, one of them shared by all tokens", divided=True),
    Family("GraniteMoe", ("granitemoe",), MIXTURE, divided=True),
    Family("MiniMaxM2", ("minimax_m2",), MIXTURE, divided=True),
    Family(
        "GptOss",
        ("gpt_oss",),
        f"{MIXTURE}, sinks, sliding windows; also in MXFP4",
        divided=True,
    ),
    Family(
        "DeepseekV3",
        ("deepseek_v3",),
        f"{MIXTURE}, one of them shared by all tokens; MLA",
        divided=True,
    ),
    Family("HunYuanMoEV1", ("hunyuan_v1_moe",), MIXTURE, divided=True),
    Family("Youtu", ("youtu",), "MLA", divided=True),
    Family("Qwen3_5Text", ("qwen3_5_text",), "recurrent layers", divided=True),
    Family("Qwen3_5MoeText", ("qwen3_5_moe_text",), f"recurrent layers, {MIXTURE}", divided=True),
    Family("Qwen3Next", ("qwen3_next",), f"recurrent layers, {MIXTURE}", divided=True),
    Family("NemotronH", ("nemotron_h",), f"recurrent layers (Mamba 2), {MIXTURE}", divided=True),
    Family("Qwen2_5_VL", ("qwen2_5_vl",), IMAGES, divided=True),
    Family("Qwen3VL", ("qwen3_vl",), IMAGES, divided=True),
    Family("Qwen3VLMoe", ("qwen3_vl_moe",), f"{IMAGES}, {MIXTURE}", divided=True),
    Family(
        "Qwen3_5",
        ("qwen3_5",),
        f"{IMAGES}, recurrent layers; also Qwen3.6 and Qwen3.8",
        divided=True,
    ),
    Family("Qwen3_5Moe", ("qwen3_5_moe",), f"{IMAGES}, recurrent layers, {MIXTURE}", divided=True),
    Family("Cohere", ("cohere",), "scales its logits", served=False),
    Family(
        "StableLm",
        ("stablelm",),
        "its code does not support custom attention functions",
        served=False,
    ),
    Family("Mamba", ("mamba",), "no attention", served=False),
    Family("GPT2", ("gpt2",), "its decoder has no `layers`", served=False),
    Family("Lfm2", ("lfm2",), "convolutions instead of attention", served=False),
    Family("FalconH1", ("falcon_h1",), "attention and Mamba in one layer", served=False),
    Family("Llama4Text", ("llama4_text", "llama4"), "its decoder has no `layers`", served=False),
    Family(
        "Llava",
        ("llava",),
        "takes images, and transformers has no text form of it",
        served=False,
    ),
    Family("T5", ("t5",), "encoder and decoder", served=False),
)

_BY_TYPE = {kind: family for family in FAMILIES for kind in family.types}


def family_of(model_type: str) -> Family | None:
    """The tested family of a `model_type`; None if it is not tested."""
    return _BY_TYPE.get(model_type)

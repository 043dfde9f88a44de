"""A simple float64 reference model for the engine. It deliberately uses no tinkex code.

One sequence at a time, full logits, LoRA as in its formula, gradients by autograd.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Reference:
    """Llama or Qwen3 from its files, with LoRA pairs as leaf tensors that collect gradients."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: tensor.double()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.scale = 0.0
        self.lora: dict[str, Tensor] = {}
        if adapter is not None:
            config = json.loads((adapter / "adapter_config.json").read_text())
            self.scale = config["lora_alpha"] / config["r"]
            self.lora = {
                name: tensor.double().requires_grad_()
                for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
            }

    def logprobs(self, tokens: list[int]) -> Tensor:
        """Log-probabilities [N, V] of what follows each token."""
        c = self.config
        x = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
            x = x + self._mlp(self._norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp")
        return self._linear(self._norm(x, "model.norm"), "lm_head").log_softmax(dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.get(f"{name}.weight")
        if weight is None and name == "lm_head":  # tied
            weight = self.weights["model.embed_tokens.weight"]
        y = x @ weight.t()
        A = self.lora.get(f"base_model.model.{name}.lora_A.weight")
        if A is not None:
            B = self.lora[f"base_model.model.{name}.lora_B.weight"]
            y = y + self.scale * (x @ A.t()) @ B.t()
        return y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        root = (x.square().mean(dim=-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / root * self.weights[f"{name}.weight"]

    def _mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up = self._linear(x, f"{at}.gate_proj"), self._linear(x, f"{at}.up_proj")
        return self._linear(gate * torch.sigmoid(gate) * up, f"{at}.down_proj")

    def _attention(self, x: Tensor, at: str) -> Tensor:
        c = self.config
        size, heads, key_heads = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        length = len(x)
        q = self._linear(x, f"{at}.q_proj").view(length, heads, size)
        k = self._linear(x, f"{at}.k_proj").view(length, key_heads, size)
        v = self._linear(x, f"{at}.v_proj").view(length, key_heads, size)
        if f"{at}.q_norm.weight" in self.weights:  # Qwen3
            q, k = self._norm(q, f"{at}.q_norm"), self._norm(k, f"{at}.k_norm")
        q, k = self._rotated(q), self._rotated(k)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outs = []
        for head in range(heads):
            own = head // (heads // key_heads)
            scores = (q[:, head] @ k[:, own].t() / math.sqrt(size)).masked_fill(future, -math.inf)
            outs.append(scores.softmax(dim=-1) @ v[:, own])
        return self._linear(torch.cat(outs, dim=-1), f"{at}.o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * self._theta**-exponents
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    @property
    def _theta(self) -> float:
        return float(self.config["rope_parameters"]["rope_theta"])


Inputs = Mapping[str, Tensor]


def _ratio(logp: Tensor, x: Inputs) -> Tensor:
    return torch.exp(logp - x["logprobs"])


def _gspo(logp: Tensor, x: Inputs) -> Tensor:
    """Each token's ratio has the value of the sequence ratio and the token's own gradient."""
    mask = x["sequence_ratio_mask"]
    sequence = torch.exp((mask * (logp - x["logprobs"])).sum() / mask.sum()).detach()
    ratio = sequence * logp.exp() / logp.exp().detach()
    advantages = x["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


#: The formulas of the protocol, for one datum: logprobs and inputs in, a number out.
LOSSES: dict[str, Callable[[Tensor, Inputs], Tensor]] = {
    "cross_entropy": lambda logp, x: -(x["weights"] * logp).sum(),
    "importance_sampling": lambda logp, x: -(_ratio(logp, x) * x["advantages"]).sum(),
    "ppo": lambda logp, x: (
        -torch.minimum(
            _ratio(logp, x) * x["advantages"], _ratio(logp, x).clamp(0.8, 1.2) * x["advantages"]
        ).sum()
    ),
    "cispo": lambda logp, x: (
        -(_ratio(logp, x).detach().clamp(0.0, 4.0) * x["advantages"] * logp).sum()
    ),
    "dro": lambda logp, x: (
        -(logp * x["advantages"] - 0.5 * 0.05 * (logp - x["logprobs"]) ** 2).sum()
    ),
    "gspo": _gspo,
}

"""The sizes of a model from its config and the names and shapes of its weights: nothing is loaded.

Names are those of safetensors files, in which families differ: experts are matrices of their own or
one tensor, attention has three projections or one. Which layers are adapted, and how, follows the
same rules as in a loaded model (`targets`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinkex.engine.model.experts_shape import (
    ExpertsShape,
    find_experts,
    is_of_expert,
    is_router,
)
from tinkex.engine.model.recurrent_shape import CONVOLUTION, RecurrentShape, Shape
from tinkex.engine.model.step_memory import PROBE_RANK, PackedShape
from tinkex.engine.model.targets import (
    NOT_ADAPTED,
    Target,
    TargetKind,
    experts_targets,
    head_target,
    is_attention,
    linear_target,
    make_layout,
)
from tinkex.engine.model.tower_shape import TowerShape

#: Parts of models that take images or sound, and layers that only predict further tokens.
NOT_TEXT = frozenset(
    {
        *("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector"),
        *("embed_vision", "embed_audio", "mtp"),
    }
)
#: What models of `image_models` call the part that reads images.
TOWER = "visual"
#: Tensors of older programs that are no weights.
BUFFERS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")

EMBEDDINGS = frozenset({"embed_tokens", "embed_in", "embeddings"})
HEADS = frozenset({"lm_head", "embed_out"})

#: The linear layers of a layer of the usual form, and what it may have as norms.
USUAL_LINEARS = {
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}
USUAL_NORMS = {"input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
#: Keys of configs that must be absent or have this value in models of the usual form: factors of
#: Granite, layers of SmolLM3 without rotation, partial rotation, caps of Gemma.
USUAL_CONFIG: dict[str, Any] = {
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "no_rope_layers": None,
    "partial_rotary_factor": 1.0,
    "final_logit_softcapping": None,
}

_LAYER = re.compile(r"^(.*\blayers\.\d+)\.(.+)$")


class UnknownShape(ValueError):
    """The sizes of a model cannot be read from its files; the text says what is missing."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer of the decoder. Keys are paths in the layer."""

    name: str
    #: (outputs, inputs) of the linear layers, without routers and experts.
    linears: Mapping[str, tuple[int, int]]
    #: The size of the weight of each norm.
    norms: Mapping[str, int]
    experts: Mapping[str, ExpertsShape]
    recurrent: RecurrentShape | None

    @classmethod
    def of(
        cls, name: str, tensors: Mapping[str, Shape], hidden: int, config: Mapping[str, Any]
    ) -> LayerShape:
        experts = find_experts(tensors, hidden)
        recurrent = _find_recurrent(tensors, config)
        linears: dict[str, tuple[int, int]] = {}
        norms: dict[str, int] = {}
        for key, shape in tensors.items():
            path, _, kind = key.rpartition(".")
            parent, _, leaf = path.rpartition(".")
            if kind != "weight" or is_of_expert(key) or (experts and is_router(path)):
                continue
            if recurrent is not None and leaf in recurrent.projections:
                for each, outputs in recurrent.projections[leaf].items():
                    linears[f"{parent}.{each}"] = (outputs, shape[1])
            elif len(shape) == 2:
                linears[path] = (shape[0], shape[1])
            elif len(shape) == 1:
                norms[path] = shape[0]
        return cls(name=name, linears=linears, norms=norms, experts=experts, recurrent=recurrent)

    @cached_property
    def targets(self) -> list[Target]:
        """What is adapted in this layer."""
        found = [
            linear_target(
                f"{self.name}.{path}", kind=self._kind(path), inputs=inputs, outputs=outputs
            )
            for path, (outputs, inputs) in self.linears.items()
            if path.rpartition(".")[2] not in NOT_ADAPTED
        ]
        for path, experts in self.experts.items():
            found += experts_targets(
                f"{self.name}.{path}",
                ("w1", "w3") if experts.gated else ("w1",),
                count=experts.count,
                hidden=experts.hidden,
                inner=experts.inner,
            )
        return found

    def _kind(self, path: str) -> TargetKind:
        parent = path.rpartition(".")[0]
        parts = {
            other.rpartition(".")[2] for other in self.linears if other.rpartition(".")[0] == parent
        }
        recurs = self.recurrent is not None and "out_proj" in parts
        return "attn" if recurs or is_attention(parent, parts) else "mlp"

    @property
    def attends(self) -> bool:
        return any(target.kind == "attn" for target in self.targets)

    def outputs(self, *leaves: str) -> int:
        """Of the linear layers that are called so, together."""
        return sum(self.linears[path][0] for path in self._called(leaves))

    def inputs(self, *leaves: str) -> int:
        return sum(self.linears[path][1] for path in self._called(leaves))

    def _called(self, leaves: tuple[str, ...]) -> list[str]:
        return [path for path in self.linears if path.rpartition(".")[2] in leaves]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The text part of a causal language model, and what reads its images."""

    #: Of the text part.
    config: Mapping[str, Any]
    layers: list[LayerShape]
    vocabulary: int
    hidden: int
    #: Numbers in all weights but the output projection.
    parameters: int
    #: Whether the output projection is the embedding.
    tied: bool
    #: What reads images; None if images are refused.
    tower: TowerShape | None = None

    @classmethod
    def of(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Shape], *, images: bool = False
    ) -> ModelShape:
        """
        From the names and shapes of all tensors. `read_shape` explains errors.

        `images` says whether the vision tower is used too.
        """
        text = text_config(config)
        count = _layer_count(text)
        layers: defaultdict[str, dict[str, Shape]] = defaultdict(dict)
        embedding = head = None
        parameters = 0
        for name, shape in _weights(tensors).items():
            if NOT_TEXT & set(name.split(".")) or name.endswith(BUFFERS):
                continue
            if (match := _LAYER.match(name)) is not None:
                # Further layers predict further tokens; transformers does not load them.
                if int(match[1].rpartition(".")[2]) >= count:
                    continue
                layers[match[1]][match[2]] = shape
            elif (leaf := name.rpartition(".")[0].rpartition(".")[2]) in HEADS:
                head = shape if len(shape) == 2 else head
                continue
            elif leaf in EMBEDDINGS:
                embedding = shape
            parameters += math.prod(shape)
        if embedding is None or len(layers) != count:
            raise UnknownShape(
                f"of {count} layers, {len(layers)} were found"
                if embedding is not None
                else "no tensor is called like the input embeddings"
            )
        found = cls(
            config=text,
            layers=[LayerShape.of(name, own, embedding[1], text) for name, own in layers.items()],
            vocabulary=(head or embedding)[0],
            hidden=embedding[1],
            parameters=parameters,
            # That of the whole model, if it has one: transformers ties by it.
            tied=head is None
            or bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings"))),
            tower=_find_tower(config, tensors, embedding[1]) if images else None,
        )
        found._check()
        return found

    def _check(self) -> None:
        """Computes all sizes, so that what is missing shows now."""
        self.context, self.packed, self.saved_bytes(device="cpu", element=4)
        if not self.cached_numbers:
            raise UnknownShape("no layer has attention")

    @property
    def all_parameters(self) -> int:
        tower = 0 if self.tower is None else self.tower.parameters
        return self.parameters + tower + (0 if self.tied else self.vocabulary * self.hidden)

    @cached_property
    def targets(self) -> list[Target]:
        """All layers that can be adapted."""
        found = [target for layer in self.layers for target in layer.targets]
        return [*found, head_target(hidden=self.hidden, vocabulary=self.vocabulary)]

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter of all these layers."""
        return make_layout(self.targets, rank).size

    @property
    def experts(self) -> ExpertsShape | None:
        """Of the first layer that has some; None for a dense model."""
        return next((each for layer in self.layers for each in layer.experts.values()), None)

    @property
    def context(self) -> int:
        return _need(self.config, "max_position_embeddings")

    # -- attention --------------------------------------------------------------------------------

    @property
    def query_heads(self) -> int:
        return _need(self.config, "num_attention_heads")

    @property
    def key_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.query_heads)

    @property
    def head_size(self) -> int:
        return int(self.config.get("head_dim") or self.hidden // self.query_heads)

    def cached(self, layer: LayerShape) -> int:
        """How many numbers the KV cache has for each token in this layer."""
        if layer.recurrent is not None or not layer.attends:
            return 0
        if self.config.get("kv_lora_rank"):
            keys = self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]
            return self.query_heads * int(keys + self.config["v_head_dim"])
        if joint := layer.outputs("qkv_proj", "query_key_value"):
            return joint - layer.inputs("o_proj", "dense")
        projected = layer.outputs("k_proj", "v_proj")
        return projected or 2 * self.key_heads * self.head_size

    @property
    def cached_numbers(self) -> int:
        """For each token, in all layers."""
        return sum(map(self.cached, self.layers))

    def state_bytes(self, element: int) -> int:
        """The state of one sequence in all recurrent layers."""
        states = (each.recurrent for each in self.layers if each.recurrent is not None)
        return sum(state.state_bytes(element) for state in states)

    # -- activations ------------------------------------------------------------------------------

    @property
    def packed(self) -> PackedShape | None:
        """For models of the usual form, whose layers fused kernels compute; None for others."""
        first = self.layers[0]
        if (
            self.tower is not None
            or any({*layer.linears} != USUAL_LINEARS or layer.experts for layer in self.layers)
            or {*first.norms} not in (USUAL_NORMS, USUAL_NORMS | HEAD_NORMS)
            or any(first.norms.get(norm, self.head_size) != self.head_size for norm in HEAD_NORMS)
            or self.config.get("hidden_act", "silu") not in ("silu", "swish")
            or any(self.config.get(key, value) != value for key, value in USUAL_CONFIG.items())
            or self.head_size % 16
            or any(inputs % 16 for _, inputs in first.linears.values())
        ):
            return None
        return PackedShape(
            layers=len(self.layers),
            hidden=self.hidden,
            qkv=first.outputs("q_proj", "k_proj", "v_proj"),
            gate_up=first.outputs("gate_proj", "up_proj"),
            query_heads=self.query_heads,
            key_heads=self.key_heads,
            head_size=self.head_size,
            inner=first.inputs("down_proj"),
        )

    def saved_bytes(self, *, device: str, element: int) -> int:
        """
        What autograd keeps for each token with the code of transformers: an estimate.

        `element` is the size of a number.
        """
        # A CPU computes attention in float32.
        sizes = (PROBE_RANK, element, 4 if device == "cpu" else element)
        # The last norm and its result.
        end = (4 + element) * self.hidden
        return end + sum(self._saved_by(layer, *sizes) for layer in self.layers)

    def _saved_by(self, layer: LayerShape, rank: int, element: int, attention_element: int) -> int:
        # The inputs of linear layers, each once.
        inputs = {each.group: each.inputs for each in layer.targets if each.experts is None}
        query = layer.outputs("q_proj", "q_b_proj") or layer.inputs("o_proj", "dense")
        attended = attention_element * (query + self.cached(layer))
        if layer.recurrent is not None:
            attended = 0
        elif attention_element != element:
            attended += attention_element * query  # the result, before it is converted
        inner = sum(
            target.inputs
            for target in layer.targets
            if target.kind == "mlp" and target.experts is None and target.outputs == self.hidden
        )
        wide = sum(
            target.outputs
            for target in layer.targets
            if target.kind == "mlp" and target.experts is None and target.outputs != self.hidden
        )
        # With a gate also what it is after its activation.
        mlp = wide + (inner if wide >= 2 * inner else 0)
        for experts in layer.experts.values():
            chosen = int(self.config.get("num_experts_per_tok") or 1)
            mlp += chosen * experts.inner * (2 if experts.gated else 1)
            inputs["experts"] = experts.hidden
        # Norms compute in float32.
        widths = {"q_norm": query, "k_norm": layer.outputs("k_proj")}
        norms = sum(
            widths.get(path.rpartition(".")[2], size) or size for path, size in layer.norms.items()
        )
        numbers = sum(inputs.values()) + mlp + rank * len(layer.targets)
        # The sums of norms and of each head's softmax, and what a router computes of all experts.
        small = len(layer.norms) + self.query_heads
        small += sum(2 * experts.count for experts in layer.experts.values())
        if layer.recurrent is not None:
            small += layer.recurrent.saved
        return 4 * (norms + small) + attended + element * numbers


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part: that of models with images is one level down."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _layer_count(config: Mapping[str, Any]) -> int:
    # Nemotron-H has a list of them instead.
    kinds = config.get("layers_block_type")
    if isinstance(kinds, list) and "num_hidden_layers" not in config:
        return len(kinds)
    return _need(config, "num_hidden_layers")


def _need(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    if type(found) is not int or not 0 < found < 2**40:
        raise UnknownShape(f"config.json has {key} = {found!r:.100}, not a positive number")
    return found


def _weights(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """The tensors as they are loaded: without scales, and MXFP4 blocks are matrices."""
    found: dict[str, Shape] = {}
    for name, shape in tensors.items():
        if name.endswith(".weight_scale_inv"):  # of FP8
            continue
        if name.endswith("_blocks") and len(shape) == 4:
            experts, rows, groups, size = shape  # a byte has two numbers
            found[name.removesuffix("_blocks")] = (experts, rows, groups * size * 2)
        elif not (name.endswith("_scales") and f"{name[:-7]}_blocks" in tensors):
            found[name] = shape
    return found


def _find_recurrent(
    tensors: Mapping[str, Shape], config: Mapping[str, Any]
) -> RecurrentShape | None:
    parent = next((key[: -len(CONVOLUTION)] for key in tensors if key.endswith(CONVOLUTION)), None)
    if parent is None:
        return None
    own = {key[len(parent) :]: shape for key, shape in tensors.items() if key.startswith(parent)}
    return RecurrentShape.of(config, own)


def _find_tower(config: Mapping[str, Any], tensors: Mapping[str, Shape], hidden: int) -> TowerShape:
    parameters = sum(
        math.prod(shape) for name, shape in tensors.items() if TOWER in name.split(".")
    )
    return TowerShape.of(config["vision_config"], decoder=hidden, parameters=parameters)

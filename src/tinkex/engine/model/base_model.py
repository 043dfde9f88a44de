"""The frozen base model: a transformers model with three parts replaced.

Attention reads packed tokens, every linear layer can add adapters, and `lm_head` computes the
output projection. The rest of the model's code is unchanged, so a model family that transformers
supports usually works; a comparison of logits at startup refuses the others.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    PretrainedConfig,
)

from tinkex.engine.device import is_device_lost, prepare_kernels
from tinkex.engine.model import attention, model_experts, recurrent_layers
from tinkex.engine.model.attention import (
    CacheShapes,
    Packing,
    PackingLost,
    SeenLayer,
    StateShapes,
    UnsupportedAttention,
)
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.experts import Experts, RoutedTokens
from tinkex.engine.model.fused_decoder import FusedDecoder
from tinkex.engine.model.image_models import why_no_images
from tinkex.engine.model.image_places import (
    NO_IMAGES,
    packed_positions,
)
from tinkex.engine.model.lm_head import Head
from tinkex.engine.model.lora import (
    AdapterContext,
    AdapterSegment,
    Columns,
    LoraLinear,
    RecordedAdapters,
    WrongRows,
    make_pairs,
)
from tinkex.engine.model.norms import replace_norms
from tinkex.engine.model.original_decoder import (
    OriginalDecoder,
    StepDecoder,
    why_not_recorded,
)
from tinkex.engine.model.original_model import eos_token_ids, load
from tinkex.engine.model.stacked_weights import StackedWeights
from tinkex.engine.model.start_check import TOLERANCE, Probe, check_logits, probe, relative_gap
from tinkex.engine.model.step_memory import (
    PEAK_FACTOR,
    PLANNED_RANK,
    PROBE_RANK,
    PackedShape,
)
from tinkex.engine.model.targets import (
    NOT_ADAPTED,
    ROUTERS,
    Target,
    TargetKind,
    head_target,
    is_attention,
    linear_target,
    make_layout,
    text_name,
)
from tinkex.engine.model.unsupported import (
    UnsupportedModel,
)
from tinkex.engine.model.vision_tower import (
    ImageRows,
    SequencePart,
    VisionTower,
    inject,
)

if TYPE_CHECKING:
    from tinkex.engine.model.packed_layers import PackedLayers
    from tinkex.engine.ranks.process_group import ProcessGroup
    from tinkex.engine.ranks.shard import Shard

log = logging.getLogger(__name__)

# T packed tokens, H hidden size


#: Layers that are nothing but an MLP or a mixture, where a model's config lists them (Nemotron-H).
TOKEN_BY_TOKEN = {"mlp", "moe"}

#: Lengths of the passes that measure the activation memory of training.
PROBE_LENGTHS = (16, 48)
#: The same for models with recurrent layers, which pad sequences to full chunks.
RECURRENT_PROBE_LENGTHS = (recurrent_layers.CHUNK, 3 * recurrent_layers.CHUNK)


class BaseModel:
    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernels: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        """
        With `kernels`, a GPU may use other code than transformers', with other rounding.

        With `group`, this process loads and computes its part of the model only.
        """
        #: The part of this rank; None if this process has the whole model.
        self.shard: Shard | None = None
        model: Any
        if group is None:
            # A GPU reads the files itself, if transformers can: no copy in host memory, and faster.
            straight = device.type == "cuda" and importlib.util.find_spec("accelerate") is not None
            model = load(folder, dtype, device=device if straight else None)
        else:
            from tinkex.engine.ranks import first_layers, head, layers, loading

            model, self.shard = loading.load_shard(folder, dtype, device, group)
        model = model.to(device).eval().requires_grad_(False)
        self.config: PretrainedConfig = model.config
        self.device, self.dtype = device, dtype
        self.eos_token_ids = eos_token_ids(folder, model.config)
        #: Reads images; None if the model has none, or what it needs is not there.
        self.vision: VisionTower | None = None
        # The model may be the text part of that of the folder.
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
        self.made_for_images = bool(whole.get("vision_config"))
        #: Why images are refused, if they are.
        self.no_images = why_no_images(whole, folder)
        if self.no_images is None:
            self.vision = VisionTower(model, group)
        probes: list[Probe] = []
        if self.shard is None:
            probes = Probe.all_of(model, self.vision)
        self._context = AdapterContext()
        self._decoder: Any = model.get_decoder()
        self._embed: nn.Module = model.get_input_embeddings()
        output: Any = model.get_output_embeddings()
        softcap = logits_softcap(model.config)
        #: What can be adapted, and the mixtures of experts, layer by layer; none in a dense model.
        self.targets, self.experts = adapted(model, self._context)
        if self.shard is None:
            self.head = Head(output.weight, output.bias, softcap=softcap)
        else:
            self.head = head.ShardHead(output.weight, output.bias, self.shard, softcap=softcap)
            layers.connect(self._decoder.layers, self.shard)
            self.targets = self.shard.own_targets(self.shard.whole_targets(self.targets))
        recurrent_layers.replace_recurrent_layers(model)
        # A vision tower keeps its own.
        self._decoder.set_attn_implementation(attention.NAME)
        #: Decodes and reads prompts faster on a GPU; None for models of another form.
        self.fused: FusedDecoder | None = None
        #: Its weights as one matrix for each input; None for models of another form. Training uses
        #: them too, but not with experts.
        self.stacked: StackedWeights | None = None
        kernels = kernels and self.shard is None and device.type == "cuda"
        kernels = kernels and dtype == torch.bfloat16 and prepare_kernels()
        if kernels and self.vision is None:
            self.stacked = StackedWeights.of(self._decoder, self._embed, self.head)
            # The weights were moved, and their old memory is in pieces.
            torch.cuda.empty_cache()
        if self.shard is not None:
            probes.append(Probe(probe(self.vocab_size).to(device), NO_IMAGES, None, {}))
        expected_TV = probes[0].expected_TV
        after = torch.empty(0) if expected_TV is None else expected_TV[-1].clone()
        #: A few tokens, and the original model's logits after them, for kernels.
        self.probed = (probes[0].ids_T, after)
        seen, *_ = [self._check(each) for each in probes]
        if group is not None:
            first_layers.check_first_layers(self, folder, group)
        self.max_context_length = context_length(model.config, seen)
        #: Of the keys and values of every layer, for the KV cache.
        self.cache_shapes: list[CacheShapes] = [layer.shapes for layer in seen]
        #: Of the recurrent layers, which keep a state for each sequence instead; by layer.
        self.state_shapes: dict[int, StateShapes] = {
            at: layer.state for at, layer in enumerate(seen) if layer.state is not None
        }
        #: How many keys a token sees in layers that do not see all.
        self.windows = sorted({w for layer in seen if (w := layer.scoring.window) is not None})
        if self.stacked is not None:
            self.stacked = self.stacked.with_attention(seen, self.max_context_length)
        if self.stacked is not None and attention.varlen_attn is not None:
            self.fused = FusedDecoder(self.stacked, self.head, probes[0].routed)
        #: Computes decode steps that CUDA graphs record; None if nothing can.
        self.decoder: StepDecoder | None = self.fused
        if kernels and self.fused is None:
            self.decoder = self.original_decoder(probes[0].routed)
        #: Runs packed passes faster; None before its kernels are compiled, and if it cannot.
        self._packed: PackedLayers | None = None
        #: The same, set by the thread that compiles.
        self._prepared: PackedLayers | None = None
        self._original_bytes_per_token = int(self._saved_per_token() * PEAK_FACTOR)
        if group is not None:  # what fits decides what runs, on all ranks
            self._original_bytes_per_token = -group.least(-self._original_bytes_per_token)

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def original_decoder(self, routed: Mapping[str, RoutedTokens]) -> OriginalDecoder | None:
        """
        Decode steps with the code of transformers; None if the code cannot be recorded.

        `routed` are the experts that the original model chose for the probe.
        """
        why_not = why_not_recorded(self._decoder, self.targets)
        if why_not is not None:
            log.info("decode steps of this model are no CUDA graphs: %s", why_not)
            return None
        embedding: Any = self._embed
        replace_norms(self._decoder, self._context)

        def hidden(ids_B: Tensor, packing: Packing, adapters: RecordedAdapters) -> Tensor:
            return self._original_hidden(ids_B, packing, recorded=adapters, gradients=False)

        return OriginalDecoder(
            hidden,
            embedding=embedding.weight,
            head=self.head,
            targets=[target.name for target in self.targets],
            cache_shapes=self.cache_shapes,
            state_shapes=self.state_shapes,
            routed=routed,
        )

    def hidden(
        self,
        ids_T: Tensor,
        packing: Packing,
        segments: Sequence[AdapterSegment] = (),
        images: Sequence[ImageRows] = (),
    ) -> Tensor:
        """The last hidden states [T, H] of a packed pass without gradients, ready for the head."""
        if self._packed is not None:
            return self._packed.hidden(ids_T, packing, segments)
        return self._original_hidden(ids_T, packing, segments, images, gradients=False)

    def hidden_with_backward(
        self,
        ids_T: Tensor,
        packing: Packing,
        segments: Sequence[AdapterSegment] = (),
        images: Sequence[ImageRows] = (),
        *,
        checkpoint: bool = False,
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """
        The same with a backward pass, which takes the gradient of the hidden states.

        It adds to the gradients of the adapters. With `checkpoint` it takes less memory and more
        time, where that is implemented.
        """
        if self._packed is not None:
            return self._packed.hidden_with_backward(
                ids_T, packing, segments, checkpoint=checkpoint
            )
        hidden_TH = self._original_hidden(ids_T, packing, segments, images, gradients=True)
        return hidden_TH.detach(), hidden_TH.backward

    def _original_hidden(
        self,
        ids_T: Tensor,
        packing: Packing,
        segments: Sequence[AdapterSegment] = (),
        images: Sequence[ImageRows] = (),
        *,
        recorded: RecordedAdapters | None = None,
        gradients: bool,
    ) -> Tensor:
        """With the code of transformers. `recorded` are adapters instead of `segments`."""
        self._context.segments, self._context.tokens = segments, len(ids_T)
        self._context.recorded = recorded
        try:
            with torch.set_grad_enabled(gradients):
                embedded, arguments = inject(self._embed(ids_T.unsqueeze(0)), images)
                if gradients:
                    # All weights are frozen, so this is what makes autograd record the pass.
                    embedded.requires_grad_()
                output = self._decoder(
                    inputs_embeds=embedded,
                    position_ids=packing.positions,
                    use_cache=False,
                    packing=packing,
                    **arguments,
                )
        finally:
            # Segments reference adapter memory, which may be dropped or evicted after the pass.
            self._context.segments, self._context.tokens = (), None
            self._context.recorded = None
        hidden_1TH: Tensor = output.last_hidden_state
        return hidden_1TH[0]

    def prepare_packed_layers(self) -> None:
        """
        Compiles the kernels of the packed layers and compares their logits with the original's.

        Takes some seconds the first time; may run in a thread. `use_packed_layers` uses the result.
        """
        if self.stacked is None or self._packed_shape is None:
            return
        from tinkex.engine.model.packed_layers import PackedLayers, compile_kernels

        packed = PackedLayers(self.stacked)
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
                compile_kernels(packed, self.head, self.targets)
                ids_T, expected_V = self.probed
                packing = Packing.of([len(ids_T)], device=self.device)
                found_V = self.head.logits(packed.hidden(ids_T, packing, ()))[-1]
                check_logits(found_V, expected_V, TOLERANCE[self.dtype])
        except Exception as error:
            if is_device_lost(error):
                raise
            log.warning("training runs on transformers' code, which is slower", exc_info=error)
            return
        self._prepared = packed

    def use_packed_layers(self) -> None:
        """
        Uses the packed layers from now on if they are prepared.

        For the thread that computes, between two passes: a pass must not change its code midway.
        """
        if self._packed is None and self._prepared is not None:
            self._packed, self.head.fused = self._prepared, True
            log.info("training runs on fused kernels from now on")

    @property
    def size_bytes(self) -> int:
        """Memory of the frozen weights, including the head's copy."""
        weights = [*self._decoder.parameters(), *self._decoder.buffers(), *self._embed.parameters()]
        weights.append(self.head.weight_VH)
        if self.vision is not None:
            weights += self.vision.parameters
        return sum(distinct_storages(weights).values())

    @property
    def cache_bytes_per_token(self) -> int:
        size = torch.finfo(self.dtype).bits // 8
        return size * sum(heads * width for shapes in self.cache_shapes for heads, width in shapes)

    @property
    def state_bytes(self) -> int:
        """Memory of the states of one sequence in all recurrent layers; 0 if there are none."""
        size = torch.finfo(self.dtype).bits // 8
        return sum(
            size * math.prod(shapes.conv) + 4 * math.prod(shapes.matrix)
            for shapes in self.state_shapes.values()
        )

    @property
    def bytes_per_token(self) -> int:
        """Peak activation memory of a training pass per token."""
        if self._packed is None:
            return self._original_bytes_per_token
        return self.planned_bytes_per_token

    @property
    def planned_bytes_per_token(self) -> int:
        """The same once the kernels of the packed layers are compiled."""
        if self._packed_shape is None:
            return self._original_bytes_per_token
        return self._packed_shape.bytes_per_token(rank=PLANNED_RANK, element=self.dtype.itemsize)

    @property
    def checkpoint_bytes_per_token(self) -> int:
        """The same with checkpointing, if that is implemented."""
        if self._packed is None or self._packed_shape is None:
            return self.bytes_per_token
        return self._packed_shape.checkpoint_bytes_per_token(
            rank=PLANNED_RANK, element=self.dtype.itemsize
        )

    @property
    def _packed_shape(self) -> PackedShape | None:
        """The sizes of packed layers; None if there is no such code for the model."""
        return None if self.stacked is None else self.stacked.shape

    def _saved_per_token(self) -> float:
        """
        Measures what autograd saves per token in a pass with an adapter on every layer.

        The difference of two lengths excludes what does not grow with the tokens.
        """
        layout = make_layout(self.targets, PROBE_RANK)
        live = torch.zeros(layout.size, dtype=self.dtype, device=self.device)
        pairs = make_pairs(layout, live, scale=1.0)
        weights = distinct_storages([*self._decoder.parameters(), live])
        sizes = []
        lengths = RECURRENT_PROBE_LENGTHS if self.state_shapes else PROBE_LENGTHS
        for length in lengths:
            saved: list[Tensor] = []

            def save(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
                saved.append(tensor)
                return tensor

            packing = Packing.of([length], device=self.device)
            ids_T = torch.zeros(length, dtype=torch.long, device=self.device)
            segments = [AdapterSegment(0, length, pairs)]
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                output = self._original_hidden(ids_T, packing, segments, gradients=True)
            found = distinct_storages([*saved, output])
            sizes.append(sum(size for at, size in found.items() if at not in weights))
        few, many = lengths
        return (sizes[1] - sizes[0]) / (many - few)

    def _check(self, probe: Probe) -> list[SeenLayer]:
        """
        Refuses a model whose logits differ from those of the original, if these are given.

        Returns what the attention of every layer computes.
        """
        shapes: dict[int, SeenLayer] = {}
        ids_T, expected_TV, routed = probe.ids_T, probe.expected_TV, probe.routed
        compared = [each for each in self.experts if each.name in routed]
        # A second sequence before it shows whether tokens attend across the boundary.
        before = len(ids_T) // 2
        parts = [(NO_IMAGES, 0, before), (probe.places, 0, len(ids_T))]
        packing = Packing.of(
            [before, len(ids_T)],
            device=self.device,
            positions=packed_positions(parts),
            layers_seen=shapes,
        )
        images: list[ImageRows] = []
        if self.vision is not None:
            images = self.vision.rows(SequencePart(*part, owner="") for part in parts)
        try:
            with model_experts.replayed_routing(compared, routed, before):
                hidden_TH = self._original_hidden(
                    torch.cat([ids_T[-before:], ids_T]), packing, (), images, gradients=False
                )
            found_TV = self.head.logits(hidden_TH[before:])
        except PackingLost:
            raise UnsupportedModel(
                f"transformers' code for {self.config.model_type} models does not support custom "
                "attention functions. Serve another model."
            ) from None
        except WrongRows as error:
            raise UnsupportedModel(
                f"transformers' code for {self.config.model_type} models hands a linear layer other "
                f"rows than the tokens of the pass ({error}), so adapters would be added to the "
                "wrong tokens. Serve another model."
            ) from None
        except UnsupportedAttention as error:
            raise UnsupportedModel(
                f"{self.config.model_type} models use {error}, which this engine does not "
                "support. Serve another model."
            ) from None
        text = self.config.get_text_config()
        layers = text.num_hidden_layers
        for at, kind in enumerate(getattr(text, "layer_types", None) or ()):
            if kind in TOKEN_BY_TOKEN:
                shapes[at] = SeenLayer(recurrent_layers.NO_KEYS, Scoring(1.0))
        if len(shapes) != layers:
            raise UnsupportedModel(
                f"{layers - len(shapes)} of the {layers} layers of this {self.config.model_type} "
                "model are neither attention nor the gated delta rule nor Mamba 2 but other "
                "recurrent, convolutional or similar layers, which this engine does not support. "
                "Serve another model."
            )
        self.check_positions(probe)
        gap = 0.0 if expected_TV is None else relative_gap(found_TV, expected_TV)
        if not gap < TOLERANCE[self.dtype]:  # NaN is refused too
            raise UnsupportedModel(
                f"this engine does not compute {self.config.model_type} models correctly: they do "
                f"more than layers and output projection (logits differ by {gap:.1e}). "
                "Serve another model."
            )
        agreement = model_experts.agreement(compared, routed, before) if compared else 1.0
        if agreement < model_experts.MIN_AGREEMENT:
            raise UnsupportedModel(
                f"this engine does not compute {self.config.model_type} models correctly: routers "
                f"choose {agreement:.0%} of the experts that they should. Serve another model."
            )
        return [shapes[layer] for layer in sorted(shapes)]

    def check_positions(self, probe: Probe) -> None:
        """
        Refuses a model whose tokens have other positions than in the original.

        Logits show it only in float32: rounding to 16 bits changes them as much.
        """
        expected_3T = probe.positions_3T
        own_3T = packed_positions([(probe.places, 0, len(probe.ids_T))])
        if expected_3T is None or own_3T is None or torch.equal(own_3T, expected_3T.cpu()):
            return
        raise UnsupportedModel(
            f"this engine does not compute {self.config.model_type} models correctly: they give "
            "the tokens of an image, or those after it, other positions. Serve another model."
        )

    def first_layers_logits(self, count: int, probe: Probe) -> Tensor:
        """What a model of the first layers only would compute of a probe."""
        layers = self._decoder.layers
        self._decoder.layers = layers[:count]
        try:
            part = (probe.places, 0, len(probe.ids_T))
            packing = Packing.of(
                [len(probe.ids_T)], device=self.device, positions=packed_positions([part])
            )
            images: list[ImageRows] = []
            if self.vision is not None:
                images = self.vision.rows([SequencePart(*part, owner="")])
            return self.head.logits(
                self._original_hidden(probe.ids_T, packing, (), images, gradients=False)
            )
        finally:
            self._decoder.layers = layers


def distinct_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> size of the storages of these tensors, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def logits_softcap(config: PretrainedConfig) -> float | None:
    """Whether it is applied shows in the comparison of logits."""
    found = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return None if found is None else float(found)


def context_length(config: PretrainedConfig, layers: Sequence[SeenLayer]) -> int:
    """`layers` is what the attention of each layer was asked for."""
    text = config.get_text_config()
    length = int(text.max_position_embeddings)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(layers)
    ignored = any(
        kind == "sliding_attention" and layer.scoring.window != window
        for kind, layer in zip(kinds, layers, strict=False)
    )
    if window and ignored and window < length:
        # The model's code did not ask for the window of its config. Within one window, sliding
        # attention equals full attention.
        log.warning("context limited to the sliding window", extra={"tokens": window, "of": length})
        return int(window)
    return length


def adapted(model: Any, context: AdapterContext) -> tuple[list[Target], list[Experts]]:
    """Makes a model of transformers adaptable. Returns what can be adapted, and its experts."""
    targets = replace_linears(model, context)
    experts, of_experts = model_experts.replace_experts(model, context)
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    return [*targets, *of_experts, head_target(hidden=hidden, vocabulary=vocabulary)], experts


def mixes_tokens(module: nn.Module, path: str) -> bool:
    """Whether a module is attention or takes its place."""
    return is_attention(path, dir(module)) or recurrent_layers.is_recurrent(module)


def replace_linears(model: Any, context: AdapterContext) -> list[Target]:
    """Replaces the linear layers in the decoder's layers by ones that can add adapters."""
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise UnsupportedModel(
            f"transformers' code for {model.config.model_type} models has no decoder attribute "
            "`layers`. Serve another model."
        )
    prefix = text_name(next(name for name, module in model.named_modules() if module is layers))
    targets = []
    routers = ROUTERS if model_experts.experts_modules(model) else frozenset()
    for path, module in list(layers.named_modules()):
        parent_path, _, leaf = path.rpartition(".")
        if not isinstance(module, nn.Linear) or leaf in NOT_ADAPTED:
            continue
        if not routers.isdisjoint(path.split(".")):
            continue
        parent = layers.get_submodule(parent_path)
        own: Mapping[str, Columns | None] = {leaf: None}
        own = recurrent_layers.joint_projections(parent, leaf) or own
        projections = {f"{prefix}.{parent_path}.{each}": own[each] for each in own}
        linear = LoraLinear(module, f"{prefix}.{path}", context, projections)
        setattr(parent, leaf, linear)
        kind: TargetKind = "attn" if mixes_tokens(parent, parent_path) else "mlp"
        targets += [
            linear_target(
                name,
                kind=kind,
                inputs=module.in_features,
                outputs=module.out_features if columns is None else columns.outputs,
            )
            for name, columns in projections.items()
        ]
    return targets

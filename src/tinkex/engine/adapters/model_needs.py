"""What a model needs of the device's memory: predicted from its files, or measured in the engine.

Both are planned by the same code (`memory_plan`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.model.image_models import why_no_images
from tinkex.engine.model.model_shape import ModelShape, UnknownShape
from tinkex.engine.model.step_memory import PEAK_FACTOR, PLANNED_RANK
from tinkex.engine.model.targets import head_target, make_layout
from tinkex.engine.ranks.divided_shape import divided
from tinkex.models.weight_file_checks import tensor_shapes
from tinkex.wire.text_format import format_bytes

#: The float32 vectors of an adapter in training: weights, two moments and the gradient.
TRAINING_VECTORS = 4


def training_bytes(numbers: int, element: int) -> int:
    """Memory of an adapter in training; a 16-bit model reads a copy of its weights."""
    return numbers * (4 * TRAINING_VECTORS + (0 if element == 4 else element))


@dataclass(frozen=True, kw_only=True)
class ModelNeeds:
    """The memory that a base model, its cache, its passes and its adapters take."""

    #: The kind of device, cpu or cuda, and the bytes of a number there.
    device: str
    element: int
    #: Of the frozen weights.
    weights: int
    vocabulary: int
    context: int
    kv_bytes_per_token: int
    #: At the peak of a training pass.
    activation_bytes_per_token: int
    #: The state of one sequence in all recurrent layers; 0 in most models.
    state_bytes: int = 0
    #: For one token of an image, with the tower that computes it; 0 without a tower.
    image_bytes_per_token: int = 0
    #: Numbers of an adapter of this rank of all layers.
    rank: int
    adapter_numbers: int
    #: Whether decode steps are CUDA graphs, which keep their logits and a spare state.
    graphs: bool

    @property
    def training_adapter(self) -> int:
        return training_bytes(self.adapter_numbers, self.element)

    @property
    def sampler_adapter(self) -> int:
        return self.adapter_numbers * self.element

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("weights", self.weights),
            (f"an adapter of rank {self.rank} in training", self.training_adapter),
            ("the same for sampling", self.sampler_adapter),
            ("KV cache of 1,000 tokens", 1000 * self.kv_bytes_per_token),
            ("a pass of 1,000 tokens", 1000 * self.activation_bytes_per_token),
            *(
                [("an image of 1,000 tokens", 1000 * image)]
                if (image := self.image_bytes_per_token)
                else []
            ),
        )

    def table(self) -> str:
        """One line for each part, for the log."""
        width = max(len(name) for name, _ in self.parts)
        return "\n".join(f"  {name:{width}} {format_bytes(size):>9}" for name, size in self.parts)


def predicted_needs(
    shape: ModelShape,
    *,
    device: str,
    element: int,
    kernels: bool = True,
    rank: int = PLANNED_RANK,
    gpus: int = 1,
) -> ModelNeeds:
    """
    The needs of a model that is not loaded, and of adapters of this rank.

    With `gpus`, those of one of the GPUs that the model is divided over. Raises `Undivided`.

    `kernels` says whether a GPU may use its fused kernels. All but the activations of transformers'
    code, which are an estimate, is what the engine finds when it has loaded the model.
    """
    # A CPU projects to logits in float32, with a copy of the weights.
    head = 4 if device == "cpu" else element
    shared = shape.tied and head == element
    tower = shape.tower
    rows = shape.vocabulary // gpus
    targets = shape.targets
    if gpus > 1:
        shape, kernels = divided(shape, gpus), False
        head_rows = head_target(hidden=shape.hidden, vocabulary=rows)
        targets = [*shape.targets[:-1], head_rows]
    packed = shape.packed if kernels and device == "cuda" and element == 2 else None
    if packed is not None:
        activations = packed.bytes_per_token(rank=PLANNED_RANK, element=element)
    else:
        activations = int(PEAK_FACTOR * shape.saved_bytes(device=device, element=element))
    return ModelNeeds(
        device=device,
        element=element,
        weights=element * (shape.parameters + (0 if tower is None else tower.parameters))
        + (0 if shared else head * rows * shape.hidden),
        vocabulary=shape.vocabulary,
        context=shape.context,
        kv_bytes_per_token=element * shape.cached_numbers,
        state_bytes=shape.state_bytes(element),
        activation_bytes_per_token=activations,
        image_bytes_per_token=0 if tower is None else tower.image_bytes(element),
        rank=rank,
        adapter_numbers=make_layout(targets, rank).size,
        graphs=kernels and device == "cuda" and element == 2,
    )


def read_shape(folder: Path) -> ModelShape:
    """
    The sizes of the model in a folder.

    Raises `UnknownShape`, `RefusedFolder` or `GgufError`: a folder may be of any family, or damaged.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownShape(f"config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnknownShape("config.json is not a JSON object")
    tensors = tensor_shapes(folder)
    try:
        return ModelShape.of(config, tensors, images=why_no_images(config, folder) is None)
    except UnknownShape:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UnknownShape(
            f"config.json or the weights have unusual sizes ({error!r:.100})"
        ) from error

"""What the original model computes of a few tokens, with which the engine's code is compared at start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinkex.engine.model import model_experts
from tinkex.engine.model.experts import RoutedTokens
from tinkex.engine.model.image_places import (
    NO_IMAGES,
    ImagePlaces,
    PlacedImage,
)
from tinkex.engine.model.vision_tower import (
    VisionTower,
)

#: Logits may differ from those of the original model by this fraction of their largest value, which
#: allows for rounding.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a fraction of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def check_logits(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raises `ArithmeticError` if they differ by more than this fraction of the largest."""
    gap = relative_gap(found, expected)
    if not gap < tolerance:  # NaN is refused too
        raise ArithmeticError(f"logits differ from the original model's by {gap:.1e}")


def probe(vocab_size: int) -> Tensor:
    return torch.arange(12) * 7919 % vocab_size


class Probe(NamedTuple):
    """A few tokens, and what the original model computes of them, if this process has it whole."""

    ids_T: Tensor
    places: ImagePlaces
    expected_TV: Tensor | None
    routed: Mapping[str, RoutedTokens]
    #: [3, T]: the positions that the original model gives its decoder, if it gives it any.
    positions_3T: Tensor | None = None

    def to(self, device: torch.device) -> Probe:
        routed = {
            name: RoutedTokens(first, index.to(device), weights.to(device))
            for name, (first, index, weights) in self.routed.items()
        }
        expected = None if self.expected_TV is None else self.expected_TV.to(device)
        positions = None if self.positions_3T is None else self.positions_3T.cpu()
        return Probe(self.ids_T.to(device), self.places, expected, routed, positions)

    @classmethod
    def all_of(cls, model: Any, vision: VisionTower | None) -> list[Probe]:
        """Of text, and one with an image if there is a tower."""
        return [cls.of(model, None), *([] if vision is None else [cls.of(model, vision)])]

    @classmethod
    def of(cls, model: Any, vision: VisionTower | None) -> Probe:
        """With an image if there is a tower."""
        ids_T = probe(model.get_output_embeddings().weight.shape[0])
        places, arguments = NO_IMAGES, dict[str, Any]()
        if vision is not None:
            image = vision.probe_image()
            at = len(ids_T) // 3
            # The original code takes all placeholders for images.
            ids_T = ids_T.masked_fill(ids_T == vision.placeholder, 0)
            own_n = torch.full((image.tokens,), vision.placeholder)
            ids_T = torch.cat([ids_T[:at], own_n, ids_T[at:]])
            places = ImagePlaces.of([PlacedImage(at, image)], vision.merge_size)
            mask_T = torch.from_numpy(places.mask(len(ids_T)))
            arguments = {
                "pixel_values": torch.from_numpy(image.patches).to(model.device),
                "image_grid_thw": torch.tensor([image.grid], device=model.device),
                "mm_token_type_ids": mask_T.int().unsqueeze(0).to(model.device),
            }
        ids_T = ids_T.to(model.device)
        with (
            torch.no_grad(),
            model_experts.recorded_routing(model) as routed,
            recorded_positions(model) as positions,
        ):
            logits_TV: Tensor = model(
                input_ids=ids_T.unsqueeze(0), use_cache=False, **arguments
            ).logits[0]
        return cls(ids_T, places, logits_TV.float(), routed, next(iter(positions), None))


@contextlib.contextmanager
def recorded_positions(model: Any) -> Iterator[list[Tensor]]:
    """Records the positions [3, T] that a model with images gives its decoder."""
    found: list[Tensor] = []

    def record(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 3:
            # Some have a row in front for the places in the sequence.
            found.append(positions[-3:, 0])

    handle = model.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()

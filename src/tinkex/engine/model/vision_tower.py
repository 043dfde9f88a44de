"""The vision tower of a model: from the patches of an image to features in place of embeddings.

It is transformers' code without changes, is frozen, and gets no adapters. Each image is computed
alone, so that its features depend on nothing else in a batch. They are kept for a while, because
the prompts of reinforcement learning repeat: for each owner apart, because the time of an answer
would reveal the images of others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.engine.model.image_places import ImagePlaces
from tinkex.engine.model.tower_shape import IMAGE_TOKENS, TowerShape

if TYPE_CHECKING:
    from tinkex.engine.ranks.process_group import ProcessGroup

# n placeholders, H hidden size, T packed tokens


class ImageFeatures(NamedTuple):
    """Features of adjacent placeholders."""

    #: Instead of the embeddings of the placeholders.
    input_nH: Tensor
    #: Added behind the first layers of the decoder; empty in most models.
    layers_nH: tuple[Tensor, ...]

    def rows(self, start: int, stop: int) -> ImageFeatures:
        layers = tuple(each[start:stop] for each in self.layers_nH)
        return ImageFeatures(self.input_nH[start:stop], layers)

    @property
    def nbytes(self) -> int:
        return self.input_nH.nbytes + sum(each.nbytes for each in self.layers_nH)


class ImageRows(NamedTuple):
    """Features for the packed tokens from `start` on."""

    start: int
    features: ImageFeatures


class SequencePart(NamedTuple):
    """Tokens `start` to `stop` of a sequence, which are adjacent in a pass."""

    places: ImagePlaces
    start: int
    stop: int
    #: Whose images these are: features are shared within it.
    owner: str


class VisionTower:
    def __init__(self, model: Any, group: ProcessGroup | None = None) -> None:
        """
        `model` is one of transformers that reads images.

        With `group`, each rank computes the same, and gets the patches of images from rank 0.
        """
        self._group = group
        config = model.config
        self._model = model.model
        self._tower = model.model.visual
        weight = next(self._tower.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        #: Numbers of one patch.
        self._values = self._tower.patch_embed.proj.weight[0].numel()
        #: The token that stands for a part of an image.
        self.placeholder = int(config.image_token_id)
        self.merge_size = int(config.vision_config.spatial_merge_size)
        self.shape = TowerShape.of(
            config.vision_config.to_dict(),
            decoder=config.get_text_config().hidden_size,
            parameters=sum(each.numel() for each in self._tower.parameters()),
        )
        #: By owner and content, least recently used first.
        self._kept: OrderedDict[tuple[str, bytes], ImageFeatures] = OrderedDict()
        self._kept_bytes = 0
        per_token = self.shape.feature_bytes(self._dtype.itemsize)
        self.max_kept_bytes = IMAGE_TOKENS[self._device.type] * per_token
        #: Images computed since the start, for tests.
        self.computed = 0

    @property
    def parameters(self) -> list[Tensor]:
        return [*self._tower.parameters(), *self._tower.buffers()]

    def probe_image(self) -> PreparedImage:
        """An image of two by four placeholders, to compare with the original model."""
        rows, columns = 2 * self.merge_size, 4 * self.merge_size
        wave = np.sin(np.arange(rows * columns * self._values, dtype=np.float32))
        patches = wave.reshape(rows * columns, self._values)
        return PreparedImage(b"probe", (1, rows, columns), patches, tokens=8)

    def features(self, image: PreparedImage, owner: str) -> ImageFeatures:
        key = (owner, image.digest)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        found = self.compute(image)
        self._kept[key] = found
        self._kept_bytes += found.nbytes
        while self._kept_bytes > self.max_kept_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.nbytes
        return found

    # Not in the inference mode of the sampler: autograd may read what it keeps.
    @torch.inference_mode(False)
    @torch.no_grad()
    def compute(self, image: PreparedImage) -> ImageFeatures:
        self.computed += 1
        if self._group is None or not self._group.rank:
            patches = torch.from_numpy(image.patches).to(self._device, self._dtype)
        else:
            shape = (math.prod(image.grid), self._values)
            patches = torch.empty(shape, device=self._device, dtype=self._dtype)
        if self._group is not None:
            patches = self._group.first(patches)
        grid = torch.tensor([image.grid], device=self._device)
        output = self._model.get_image_features(patches, grid, return_dict=True)
        (input_nH,) = output.pooler_output
        layers = getattr(output, "deepstack_features", None) or ()
        return ImageFeatures(
            input_nH.to(self._dtype), tuple(each[0].to(self._dtype) for each in layers)
        )

    def rows(self, parts: Iterable[SequencePart]) -> list[ImageRows]:
        """The features of the images in a pass, of which these are the parts in their order."""
        found, begin = [], 0
        for part in parts:
            for start, image in part.places.images:
                first, last = max(start, part.start), min(start + image.tokens, part.stop)
                if first < last:
                    features = self.features(image, part.owner).rows(first - start, last - start)
                    found.append(ImageRows(begin + first - part.start, features))
            begin += part.stop - part.start
        return found


def inject(embedded_1TH: Tensor, images: Sequence[ImageRows]) -> tuple[Tensor, dict[str, Any]]:
    """The input of the decoder with the features of images, and its arguments for them."""
    if not images:
        return embedded_1TH, {}
    embedded_1TH = embedded_1TH.clone()
    mask_1T = torch.zeros(embedded_1TH.shape[:2], dtype=torch.bool, device=embedded_1TH.device)
    for start, features in images:
        stop = start + len(features.input_nH)
        embedded_1TH[0, start:stop] = features.input_nH
        mask_1T[0, start:stop] = True
    if not images[0].features.layers_nH:
        return embedded_1TH, {}
    layers = zip(*(each.features.layers_nH for each in images), strict=True)
    return embedded_1TH, {
        "visual_pos_masks": mask_1T,
        "deepstack_visual_embeds": [torch.cat(layer) for layer in layers],
    }

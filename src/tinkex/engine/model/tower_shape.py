"""The sizes of a vision tower, and the memory that images take. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Placeholders of images whose features are kept, by the kind of device. The tower also computes one
#: image of that size without further memory than is planned.
IMAGE_TOKENS = {"cpu": 4096, "cuda": 16384}


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    #: Numbers in all weights.
    parameters: int
    #: Widths of a layer of the tower, and of its MLP.
    hidden: int
    inner: int
    #: Patches that are one placeholder.
    merged: int
    #: Features of a placeholder: the width of the decoder, for its input and for some of its layers.
    features: int

    @classmethod
    def of(cls, config: Mapping[str, Any], *, decoder: int, parameters: int) -> TowerShape:
        """`config` is that of the tower, `decoder` the hidden size of the text part."""
        layers = config.get("deepstack_visual_indexes") or ()
        return cls(
            parameters=parameters,
            hidden=int(config["hidden_size"]),
            inner=int(config["intermediate_size"]),
            merged=int(config["spatial_merge_size"]) ** 2,
            features=decoder * (1 + len(layers)),
        )

    def feature_bytes(self, element: int) -> int:
        """Of the features of a placeholder."""
        return element * self.features

    def image_bytes(self, element: int) -> int:
        """
        Memory for a placeholder: its features, and what the tower needs to compute them.

        At its peak a layer has its input, queries, keys and values and their rotated forms, or the
        wide part of the MLP before and after its activation.
        """
        widest = self.hidden + max(7 * self.hidden, 3 * self.inner)
        return self.feature_bytes(element) + element * self.merged * widest

"""The refusal of a base model."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """The folder holds a model that this engine cannot compute correctly."""

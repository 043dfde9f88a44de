"""The engine: LoRA training and sampling over one frozen base model. Imports torch."""

from tinkex.engine.engine import Engine
from tinkex.engine.settings import EngineFacts, EngineSettings

__all__ = ["Engine", "EngineFacts", "EngineSettings"]

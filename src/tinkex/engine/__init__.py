"""The engine: LoRA training and sampling over one frozen base model.

Names are imported lazily, so that the scheduler and the KV pages can be used without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.engine.engine import Engine
    from tinkex.engine.sampling.interface import Finished
    from tinkex.wire.engine_settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "Finished"]

_MODULES = {
    "Engine": "tinkex.engine.engine",
    "EngineSettings": "tinkex.wire.engine_settings",
    "Finished": "tinkex.engine.sampling.sampler",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

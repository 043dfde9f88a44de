"""The single-endpoint classes of the official client, under its import paths."""

from tinkex.compat.resources import *
from tinkex.compat.resources import __all__ as __all__
from tinkex.compat.submodule_aliases import aliases as _aliases

__path__.append(_aliases(__name__, "futures models sampling service telemetry training weights"))

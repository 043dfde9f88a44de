"""Encoding and decoding of protobuf bodies, under the import paths of the official client."""

from tinkex.compat.protobuf import *
from tinkex.compat.protobuf import __all__ as __all__
from tinkex.compat.submodule_aliases import aliases as _aliases

__path__.append(_aliases(__name__, "request_conv response_conv"))

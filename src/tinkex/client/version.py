"""The version of this distribution."""

from __future__ import annotations

import importlib.metadata

try:
    __version__ = importlib.metadata.version("tinkex")
except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

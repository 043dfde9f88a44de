"""Warnings that point at the line of the user's program, not at a line of this package."""

from __future__ import annotations

import os
import sys
import warnings

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost frame outside this package; `_async` variants have no fixed depth."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)

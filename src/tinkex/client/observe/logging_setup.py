"""`TINKER_LOG=debug|info`: what the client does, on stderr, unless the program logs by itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO}
FORMAT = "[%(asctime)s - %(name)s:%(lineno)d - %(levelname)s] %(message)s"


class _Stderr(logging.Handler):
    """
    Writes only while nobody else would.

    The root logger is never touched: a program that sets up logging, before or after it imports
    this package, gets our records in its own way, and each of them once.
    """

    def emit(self, record: logging.LogRecord) -> None:
        ours = logging.getLogger("tinkex")
        others = any(handler is not self for handler in ours.handlers)
        if others or (ours.propagate and logging.getLogger().handlers):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError, TypeError, AttributeError):  # closed, or a record that is odd
            self.handleError(record)


def configure(env: Mapping[str, str]) -> None:
    """Set the level that the environment names; anything but `debug` and `info` is ignored."""
    from tinkex.client.settings import setting

    level = LEVELS.get((setting("LOG", env) or "").lower())
    if level is None:
        return
    logger = logging.getLogger("tinkex")
    logger.setLevel(level)
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)

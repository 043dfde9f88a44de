"""`TINKER_LOG=debug|info`: logs the client to stderr, unless the program configures logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO}
FORMAT = "[%(asctime)s - %(name)s:%(lineno)d - %(levelname)s] %(message)s"


class _Stderr(logging.Handler):
    """
    Writes only if no other handler would.

    The root logger is not changed: a program that configures logging, before or after it imports
    this package, gets each record once, through its own handlers.
    """

    def emit(self, record: logging.LogRecord) -> None:
        ours = logging.getLogger("tinkex")
        others = any(handler is not self for handler in ours.handlers)
        if others or (ours.propagate and logging.getLogger().handlers):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError, TypeError, AttributeError):  # a closed stream, or a bad record
            self.handleError(record)


def configure(env: Mapping[str, str]) -> None:
    """Set the level that the environment names; other values than `debug` and `info` are ignored."""
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

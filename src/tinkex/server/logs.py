"""The log of a server process: one line for each event on standard error, without keys and tokens."""

import logging
import sys

from tinkex.wire.scrubbing import ScrubbedFormatter

FORMAT = "%(asctime)s %(name)s %(message)s"


def begin() -> None:
    """What every logger of this process writes from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ScrubbedFormatter(FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    # It tells of its own parts each time it is loaded; what it does to the database is ours to say.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def tell(level: str) -> None:
    """How much our own loggers say; those of libraries stay as they are."""
    logging.getLogger("tinkex").setLevel(level.upper())

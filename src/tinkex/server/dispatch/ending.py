"""What becomes of a request: a result, or a failure that says whose it is."""

import logging
import secrets
from dataclasses import dataclass

from tinkex.server.dispatch.company import MOST_DEATHS
from tinkex.server.plan import Cause
from tinkex.server.store import Damaged

log = logging.getLogger("tinkex.server.dispatch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a request ended."""

    result: bytes = b""
    error: str | None = None
    category: str | None = None
    cause: Cause = Cause.WORK
    #: The commit has happened already, together with other rows.
    committed: bool = False
    #: The next request of its kind would end the same way.
    lasting: bool = False


def deadly(reason: str) -> Ending:
    """The engine dies of it, so the others must not meet it again."""
    return Ending(
        error=f"the engine died {MOST_DEATHS} times while this request was running, the last time "
        f"with nothing else beside it, so it is not tried again: {reason}. "
        "The server's log says more.",
        category="server",
    )


def unstorable(error: Exception) -> Ending:
    """Its result was computed, and nothing takes it."""
    number = secrets.token_hex(4)
    log.error("a result could not be stored (%s)", number, exc_info=error)
    return Ending(
        error=f"its result could not be stored ({type(error).__name__}), so it counts as not done. "
        f"Send the work again. The server's log has the details under the id {number}.",
        category="server",
    )


def bug(error: Exception) -> Ending:
    """A bug fails what met it, and is in the log under the id that its user sees."""
    number = secrets.token_hex(4)
    if isinstance(error, Damaged):
        log.error("damage %s: %s", number, error)
        text = f"{error}. The server's log has this under the id {number}."
        return Ending(error=text, category="server")
    log.error("bug %s", number, exc_info=error)
    return Ending(
        error=f"the server failed unexpectedly ({type(error).__name__}). "
        f"Its log has the details under the id {number}.",
        category="server",
    )

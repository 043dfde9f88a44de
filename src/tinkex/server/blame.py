"""
Whether a death counts against the requests that were with an engine when it happened. Pure.

A death that the web process saw, it counts itself. These rules are for what its successor finds: a
web process that ended without a word, and requests that were with an engine at that moment. Whoever
restarts a server, or kills its web process, must not fail anybody's work by it.
"""

import enum
import signal
from dataclasses import dataclass

#: Ends of a web process that somebody else brought about.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Engine(enum.StrEnum):
    """What an engine was doing last, as far as it is written down."""

    NONE = "none"  # not up yet, or seen to end and counted by whoever saw it
    UP = "up"  # it worked
    LEFT = "left"  # it outlived its web process, and left because that was gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """What a web process left behind of one engine."""

    engine: Engine
    #: Of the machine: another one after each start of it.
    boot_id: str
    #: Who was with the engine: request ids, and names of other work.
    inside: tuple[str, ...]


def crashed(status: int, *, oom_kills: int) -> bool:
    """
    Whether a web process that nobody had told to stop died of what it did.

    `status` is its exit status, negative for a signal; `oom_kills` is how many processes the system
    killed for memory while it lived. Without one of those, a SIGKILL is somebody's hand.
    """
    if status >= 0 or -status not in _FROM_OUTSIDE:
        return True
    return -status == signal.SIGKILL and oom_kills > 0


def counts(remains: Remains, *, boot_id: str, web_crashed: bool) -> bool:
    """Whether what was with this engine is to be counted as lost with it once more."""
    if remains.boot_id != boot_id:
        return False  # the machine went down with everything on it
    if remains.engine is Engine.UP:
        return True  # it died as well, and nobody was left to see it
    # An engine that was well at the end is no witness against its work, unless that came back to
    # the web process and broke it there.
    return remains.engine is Engine.LEFT and web_crashed

"""How long to wait before a process that died is started again. No clock, no processes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BackOff:
    """At once after a good life; else a little, then twice as long each time, up to a limit."""

    first_s: float
    longest_s: float

    def wait_s(self, last_s: float | None, *, well: bool) -> float:
        """The next wait, by the one before it (None: there was none) and how the life since went."""
        if last_s is None or well:
            return 0.0
        return min(max(self.first_s, 2 * last_s), self.longest_s)


#: Of the web process; connections wait in the listening socket meanwhile.
WEB = BackOff(first_s=0.2, longest_s=5.0)
WEB_STEADY_S = 3.0
#: Of an engine; loading a large model takes minutes, and what is in its way rarely goes by itself.
ENGINE = BackOff(first_s=0.5, longest_s=30.0)
ENGINE_STEADY_S = 60.0


def web_was_well(*, ready: bool, lived_s: float) -> bool:
    """One that got ready and died at once may do so for ever."""
    return ready and lived_s > WEB_STEADY_S


def engine_was_well(*, answered: bool, lived_s: float) -> bool:
    """One that did something was well: it need not wait as one that cannot come up."""
    return answered or lived_s > ENGINE_STEADY_S

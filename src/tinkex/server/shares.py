"""
Who may ask for how much, and whose turn to train is next. No clock, no sockets, no SQL.

Two decisions. `over_limit`: may this owner have one more request accepted? `Shares`: which owner's
model goes to the engine next, so that many models of one do not starve the only one of another.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

# Models that are with an engine at once: as many as it can put into one batch to advantage.
PLACES = 32
# Of these each owner has no more than so many while others want some too: then the wait of a
# newcomer is a few turns long, whatever is queued.
CONTESTED_PLACES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one owner may have at once; 0 is no limit."""

    max_requests: int = 0
    max_queued_tokens: int = 0
    max_samples: int = 0
    max_training: int = 0

    @classmethod
    def of(cls, settings: object, own: Mapping[str, int]) -> "Limits":
        """The server's, with those of a key in their place."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: own.get(name, getattr(settings, name)) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one owner has accepted and not finished."""

    requests: int = 0
    tokens: int = 0
    #: Sequences being sampled.
    samples: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            requests=self.requests + other.requests,
            tokens=self.tokens + other.tokens,
            samples=self.samples + other.samples,
        )

    def __sub__(self, other: "Load") -> "Load":
        return self + Load(requests=-other.requests, tokens=-other.tokens, samples=-other.samples)


def over_limit(load: Load, new: Load, limits: Limits) -> str | None:
    """Why one more request is too many; None when it fits."""
    if not load.requests:
        # Alone, it may be as large as it is: otherwise it would never come in.
        return None
    total = load + new
    for has, more, most, what in (
        (load.requests, 1, limits.max_requests, "requests that are not finished"),
        (load.tokens, new.tokens, limits.max_queued_tokens, "tokens in unfinished requests"),
        (load.samples, new.samples, limits.max_samples, "sequences being sampled"),
    ):
        if most and more and has + more > most:
            return (
                f"you have {has} {what}, and {most} are allowed. Send this again when some are "
                f"done ({total.requests - 1} requests are on their way)."
            )
    return None


def all_full(unfinished: int, most: int, *, own: int, owners: int) -> str | None:
    """
    Why the server takes nothing more from this owner; None when it does.

    `owners` have something unfinished, or ask now. Who has less than an even share of a full
    server is let in, up to twice what it takes: nobody can close it to others by filling it.
    """
    if not most or unfinished < most or (own < most // owners and unfinished < 2 * most):
        return None
    return (
        f"the server has {unfinished} requests that are not finished, and takes {most} at once. "
        "Send this again when some are done."
    )


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Ask:
    """One model that has a turn to take."""

    owner: str
    #: Models of this owner that may train at once; 0 is no limit.
    most: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Why something waits: `queue_state` of the protocol, and the reason."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"]
    reason: str | None = None


@dataclass(slots=True)
class Shares:
    """
    The places of one engine for training, shared evenly by owners.

    The next place goes to the owner with the fewest taken; among equals, to the one who has used
    the least time; among those, to who asked first. Time while an owner wanted nothing is not
    saved up.
    """

    places: int = PLACES
    contested_places: int = CONTESTED_PLACES
    _waiting: list[Ask] = field(default_factory=list)
    _running: dict[Ask, None] = field(default_factory=dict)
    #: Seconds of computing, by owner, of those who want some now.
    _used_s: dict[str, float] = field(default_factory=dict)

    def ask(self, ask: Ask) -> None:
        """A turn is ready to be taken."""
        present = self._present()
        if ask.owner not in present:
            least = min((self._used_s[owner] for owner in present), default=0.0)
            self._used_s[ask.owner] = max(least, self._used_s.get(ask.owner, 0.0))
        self._waiting.append(ask)

    def take(self) -> Ask | None:
        """Who goes next; None while all places are taken or nobody may."""
        if len(self._running) >= self.places:
            return None
        taken, contested = self._taken(), self.contested
        free = [ask for ask in self._waiting if self._why_not(ask, taken, contested) is None]
        if not free:
            return None
        # `min` keeps the first of equals.
        best = min(free, key=lambda ask: (taken[ask.owner], self._used_s[ask.owner]))
        self._waiting.remove(best)
        self._running[best] = None
        return best

    def done(self, ask: Ask, *, used_s: float) -> None:
        """A turn is over, or given up while it waited."""
        if ask in self._running:
            del self._running[ask]
            self._used_s[ask.owner] += used_s
        elif ask in self._waiting:
            self._waiting.remove(ask)
        if not self._present():
            self._used_s.clear()

    def why(self, ask: Ask) -> Waiting:
        """How an ask stands."""
        if ask not in self._waiting:
            return Waiting(state="active")
        waits = self._why_not(ask, self._taken(), self.contested)
        return waits or Waiting(state="active")

    @property
    def contested(self) -> bool:
        """Whether more than one owner wants places."""
        return len(self._present()) > 1

    def _why_not(self, ask: Ask, taken: Counter[str], contested: bool) -> Waiting | None:
        mine = taken[ask.owner]
        if ask.most and mine >= ask.most:
            return Waiting(
                state="paused_rate_limit",
                reason=f"{mine} of your models are training, and {ask.most} may at once",
            )
        if len(self._running) >= self.places:
            return Waiting(
                state="paused_capacity",
                reason=f"{len(self._running)} models are training, and {len(self._waiting)} wait",
            )
        if contested and mine >= self.contested_places:
            return Waiting(
                state="paused_capacity",
                reason=f"{mine} of your models are training, and other owners want their share",
            )
        return None

    def _taken(self) -> Counter[str]:
        return Counter(ask.owner for ask in self._running)

    def _present(self) -> set[str]:
        return {ask.owner for ask in self._waiting} | {ask.owner for ask in self._running}

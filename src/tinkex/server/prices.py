"""What usage costs, from the settings `prices` and `price_gb_month`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

#: Hours in a month, for storage prices.
HOURS_PER_MONTH = 730.0
#: The price entry for base models without an entry of their own.
ANY_MODEL = "*"
#: Priced token kinds, in the order of a price entry.
PRICED_TOKENS = ("training", "prefill", "cached", "sampled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """US dollars per million tokens, by base model and token kind."""

    by_model: Mapping[str, Mapping[str, float]]

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Parse `BASE=USD` or `BASE=TRAINING/PREFILL/CACHED/SAMPLED` entries; may raise ValueError."""
        by_model = {}
        for entry in entries:
            # A model name may contain any character, so split at the last `=`.
            name, _, text = entry.rpartition("=")
            try:
                numbers = [float(part) for part in text.split("/")]
            except ValueError:
                numbers = []
            if len(numbers) == 1:
                numbers *= len(PRICED_TOKENS)
            if not name or len(numbers) != len(PRICED_TOKENS) or not all(n >= 0 for n in numbers):
                raise ValueError(f"{entry!r} is not a price")
            by_model[name] = dict(zip(PRICED_TOKENS, numbers, strict=True))
        return cls(by_model=by_model)

    def rate(self, base_model: str, kind: str) -> float | None:
        """US dollars per million tokens; None without a price."""
        found = self.by_model.get(base_model, self.by_model.get(ANY_MODEL))
        return None if found is None else found[kind]

"""What things cost here, if anybody said so: pure, from settings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

#: A month of storage is this many hours.
HOURS_A_MONTH = 730.0
#: For every base model that has no price of its own.
ANY = "*"
#: What is priced, in the order in which prices are written.
KINDS = ("training", "prefill", "cached", "sampled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """US dollars for a million tokens, by base model and kind."""

    by_model: Mapping[str, Mapping[str, float]]

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """From `BASE=USD` or `BASE=TRAINING/PREFILL/CACHED/SAMPLED`; ValueError says what is wrong."""
        by_model = {}
        for entry in entries:
            # Names of models may hold anything but this sign at their end.
            name, _, text = entry.rpartition("=")
            try:
                numbers = [float(part) for part in text.split("/")]
            except ValueError:
                numbers = []
            if len(numbers) == 1:
                numbers *= len(KINDS)
            if not name or len(numbers) != len(KINDS) or not all(n >= 0 for n in numbers):
                raise ValueError(f"{entry!r} is not a price")
            by_model[name] = dict(zip(KINDS, numbers, strict=True))
        return cls(by_model=by_model)

    def rate(self, base_model: str, kind: str) -> float | None:
        """For a million tokens; None where nobody set a price."""
        found = self.by_model.get(base_model, self.by_model.get(ANY))
        return None if found is None else found[kind]

"""Pages of a list have an end in bytes too: what clients say about their things may be long."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tinkex.wire.errors import UserFailure

#: Characters of all metadata on one page. It is in memory several times before it is sent.
MOST_METADATA = 16 * 2**20
#: Rows that are looked at together.
SLICE = 200


def characters_of(metadata: Mapping[str, Any] | None) -> int:
    return sum(len(key) + len(str(value)) for key, value in (metadata or {}).items())


class Weight:
    """What the metadata of a page comes to; raises when it is too much."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._characters = 0
        self._entries = 0

    def add(self, metadata: Mapping[str, Any] | None) -> None:
        self._entries += 1
        self._characters += characters_of(metadata)
        if self._characters > MOST_METADATA:
            raise UserFailure(
                f"the first {self._entries} entries have more than {MOST_METADATA} characters of "
                f"metadata, which is the most of one answer. {self._advice}"
            )


def slices(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), SLICE):
        yield ids[start : start + SLICE]


def weighed(
    rows: Iterable[tuple[str, Mapping[str, Any]]], advice: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The same pairs of a name and its metadata, as far as they fit."""
    weight = Weight(advice)
    for name, metadata in rows:
        weight.add(metadata)
        yield name, metadata

"""
Tokens, counted in the transaction that stores a result.

Sums of one transaction gather on its connection and are written once, before it commits: many
small results cost one row, and a result that is not stored is not counted.
"""

import time
from collections.abc import Iterator

import sqlalchemy as sa

from tinkex.server.store.tables import usage
from tinkex.wire.errors import WireError
from tinkex.wire.protobuf import count_sample_tokens

HOUR_S = 3600

TRAINING = "training"  # tokens of the examples of forward and forward_backward
PREFILL = "prefill"  # prompt tokens that were computed
CACHED = "cached"  # prompt tokens that the prefix cache had
SAMPLED = "sampled"  # tokens drawn

_PASSES = frozenset({"forward", "forward_backward"})
_SAMPLE = "sample"
_TALLY = "usage"

_KEY = ("owner", "hour", "session_id", "base_model", "what")
_ADD = (
    usage.update()
    .where(*(usage.c[name] == sa.bindparam(f"of_{name}") for name in _KEY))
    .values(amount=usage.c.amount + sa.bindparam("more"))
)
_INSERT = usage.insert()


def count(
    connection: sa.Connection,
    *,
    owner: str,
    session_id: str | None,
    base_model: str,
    kind: str,
    tokens: int,
    result: bytes,
) -> None:
    """Count a request that is being finished inside this transaction."""
    hour = int(time.time()) // HOUR_S
    tally: dict[tuple[str, int, str, str, str], int] = connection.info.setdefault(_TALLY, {})
    for what, amount in _amounts(kind, tokens, result):
        key = (owner, hour, session_id or "", base_model, what)
        tally[key] = tally.get(key, 0) + amount


def write(connection: sa.Connection) -> None:
    """Put the sums of this transaction into the table: the last thing before it commits."""
    tally: dict[tuple[str, int, str, str, str], int] = connection.info.pop(_TALLY, {})
    for key, amount in tally.items():
        named = dict(zip(_KEY, key, strict=True))
        known = {f"of_{name}": value for name, value in named.items()}
        if connection.execute(_ADD, {**known, "more": amount}).rowcount == 0:
            connection.execute(_INSERT, {**named, "amount": amount})


def forget(connection: sa.Connection) -> None:
    """The transaction was undone, and what it counted with it."""
    connection.info.pop(_TALLY, None)


def _amounts(kind: str, tokens: int, result: bytes) -> Iterator[tuple[str, int]]:
    if kind in _PASSES and tokens:
        yield TRAINING, tokens
    if kind == _SAMPLE:
        try:
            hits, sampled = count_sample_tokens(result)
        except WireError:
            # Whatever an engine answered is stored as it is; it must not cost the user the result.
            hits, sampled = 0, 0
        cached = min(hits, tokens)
        for what, amount in ((PREFILL, tokens - cached), (CACHED, cached), (SAMPLED, sampled)):
            if amount:
                yield what, amount

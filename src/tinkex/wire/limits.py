"""
How much of everything a request may hold, looked at before anything is built from it.

A body of a few bytes must not become gigabytes: in JSON three bytes are an object, in protobuf two
are a message. So the parts of a large body are counted first, and every list, text and table of a
message has an end. Over it is a `TooLarge` (the whole) or a `WireError` with the field (a part).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tinkex.wire.errors import TooLarge, WireError
from tinkex.wire.varint import BYTES, EIGHT_BYTES, FOUR_BYTES, VARINT, read_varint

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

__all__ = [
    "check_count",
    "check_fields",
    "check_finite",
    "check_json",
    "check_protobuf",
    "check_text",
]

#: Smaller bodies cannot become large whatever they hold, and are not counted.
MIN_COUNTED_BYTES: Final = 2**20

# -- of a whole body -----------------------------------------------------------------------------

#: Objects and lists in a JSON body. An empty one is 2 bytes there and 64 in memory.
MAX_CONTAINERS: Final = 2**18
#: Numbers, texts and keys in a JSON body; each is up to 100 bytes in memory.
MAX_VALUES: Final = 2**22
#: Fields of all messages in a protobuf body. An empty message is 2 bytes there and 60 in memory.
MAX_FIELDS: Final = 2**19
#: Members of a gzip body, frames of a zstd body: each costs as much as a thousand bytes.
MAX_COMPRESSED_FRAMES: Final = 1_000

# -- of a pass or a sample -----------------------------------------------------------------------

#: Examples in one pass. The official client sends at most 1024.
MAX_DATUMS: Final = 2**14
#: Pieces of one prompt or example.
MAX_CHUNKS: Final = 2**14
#: Tensors of one example, and settings of one loss.
MAX_TENSORS: Final = 64
#: Runs of tokens whose origin is told, for one example.
MAX_SPANS: Final = 2**14
#: Characters of the name of a tensor, a setting, a loss, a key.
MAX_NAME_CHARS: Final = 200

# -- of any other message ------------------------------------------------------------------------

#: Characters of any text. A whole configuration as one value of metadata fits.
MAX_TEXT_CHARS: Final = 2**14
#: Items of any list: tags, stop texts, projects.
MAX_ITEMS: Final = 1_000
#: Keys of any object: metadata.
MAX_KEYS: Final = 1_000
#: Characters of all texts and keys of one field, and one more for each value.
MAX_FIELD_CHARS: Final = 2**16
#: Requests that one poll says it has fetched.
MAX_RETRIEVED_IDS: Final = 50_000
#: Nodes of a custom loss that are read at all; engines take fewer, and say so.
MAX_NODES: Final = 4_000

#: Fields with limits of their own, by the type of the message.
_OWN: Final[Mapping[str, frozenset[str]]] = {
    "CreateCustomLossRequest": frozenset({"graph"}),
    # Why a program ended, perhaps with its traceback: cut where it is kept, never refused.
    "FinishSessionRequest": frozenset({"detail"}),
    "FuturesRetrieveRequest": frozenset({"retrieved_request_ids"}),
    "SampleRequest": frozenset({"prompt", "target_prompt_logprobs"}),
}


def check_json(body: bytes) -> None:
    """`TooLarge` for a body that would become many times larger in memory."""
    if len(body) <= MIN_COUNTED_BYTES:
        return
    # Signs inside texts are counted too; bodies of this size that are mostly text are pictures
    # in base64, which has none of these.
    containers = body.count(b"{") + body.count(b"[")
    if containers > MAX_CONTAINERS:
        raise TooLarge(
            f"the body has {containers} objects and lists, and {MAX_CONTAINERS} are allowed."
        )
    values = body.count(b",") + containers
    if values > MAX_VALUES:
        raise TooLarge(
            f"the body has {values} values, and {MAX_VALUES} are allowed. Send fewer or shorter "
            "examples in one request, or send protobuf."
        )


def check_protobuf(body: bytes, message: Descriptor) -> None:
    """The same for protobuf: its fields are counted without making them."""
    if len(body) > MIN_COUNTED_BYTES:
        _count_fields(memoryview(body), message, 0)


def check_count(loc: tuple[str | int, ...], count: int, most: int, what: str) -> None:
    if count > most:
        raise WireError.at(loc, f"{count} {what}; at most {most} are allowed.", "too_many")


def check_text(loc: tuple[str | int, ...], text: str, longest: int = MAX_TEXT_CHARS) -> None:
    if len(text) > longest:
        raise WireError.at(
            loc, f"{len(text)} characters; at most {longest} are allowed.", "too_long"
        )


def check_finite(loc: tuple[str | int, ...], value: Any) -> None:
    """`WireError` for a number, anywhere inside `value`, that is NaN or infinite."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WireError.at(
                loc,
                f"{value} is not a finite number. NaN and infinities are refused, and so is a "
                "number beyond 1.8e308, which is read as an infinity.",
                "finite_number",
            )
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            check_finite((*loc, position), item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_finite((*loc, str(key)[:MAX_NAME_CHARS]), item)


def check_fields(message: str, value: Mapping[str, Any]) -> None:
    """Every field of a message of this type that has no limits of its own."""
    own = _OWN.get(message, frozenset())
    for name, item in value.items():
        if name not in own:
            _weighed((name,), item, 0)
    graph = value.get("graph")
    if isinstance(graph, dict) and isinstance(nodes := graph.get("nodes"), list):
        check_count(("graph", "nodes"), len(nodes), MAX_NODES, "nodes")
        check_finite(("graph", "nodes"), nodes)
    fetched = value.get("retrieved_request_ids")
    if isinstance(fetched, list):
        check_count(("retrieved_request_ids",), len(fetched), MAX_RETRIEVED_IDS, "requests")
        for position, item in enumerate(fetched):
            if isinstance(item, str):
                check_text(("retrieved_request_ids", position), item, MAX_NAME_CHARS)


def _weighed(loc: tuple[str | int, ...], value: Any, weight: int) -> int:
    """What was weighed so far and this value; the parser has seen to it that it is not deep."""
    weight += 1
    if isinstance(value, str):
        check_text(loc, value)
        weight += len(value)
    elif isinstance(value, list):
        check_count(loc, len(value), MAX_ITEMS, "items")
        for position, item in enumerate(value):
            weight = _weighed((*loc, position), item, weight)
    elif isinstance(value, dict):
        check_count(loc, len(value), MAX_KEYS, "keys")
        for key, item in value.items():
            check_text((*loc, key[:MAX_NAME_CHARS]), key, MAX_NAME_CHARS)
            weight = _weighed((*loc, key), item, weight + len(key))
    elif isinstance(value, float):
        check_finite(loc, value)
    if weight > MAX_FIELD_CHARS:
        raise WireError.at(
            loc[:1], f"more than {MAX_FIELD_CHARS} characters in all are not allowed.", "too_long"
        )
    return weight


def _count_fields(body: memoryview, message: Descriptor, count: int) -> int:
    """Counts as far as the bytes make sense; the parser says where they stop."""
    known = message.fields_by_number
    at, end = 0, len(body)
    while 0 <= at < end:
        key, at = read_varint(body, at)
        count += 1
        if count > MAX_FIELDS:
            raise TooLarge(
                f"the body has more than {MAX_FIELDS} fields, which is the most that is allowed. "
                "Send fewer examples in one request."
            )
        if at < 0:
            return count
        wire_type = key & 7
        if wire_type == VARINT:
            _, at = read_varint(body, at)
        elif wire_type == BYTES:
            size, at = read_varint(body, at)
            if at < 0:
                return count
            field = known.get(key >> 3)
            if field is not None and field.message_type is not None:
                count = _count_fields(body[at : at + size], field.message_type, count)
            elif field is not None and field.is_packed:
                count += size
            at += size
        elif wire_type in (EIGHT_BYTES, FOUR_BYTES):
            at += 8 if wire_type == EIGHT_BYTES else 4
        else:
            return count
    return count

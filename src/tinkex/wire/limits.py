"""
Size limits of requests, checked before any object is built.

A small body must not become gigabytes in memory: an object takes three bytes in JSON, a message two
in protobuf. So the elements of a large body are counted before it is parsed, and every list, string
and map of a message has a limit. `TooLarge` if the whole body is over, `WireError` for one field.
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

#: Bodies up to this size cannot become large in memory and are not counted.
MIN_COUNTED_BYTES: Final = 2**20

# -- limits of a whole body ----------------------------------------------------------------------

#: Objects and lists in a JSON body. An empty one is 2 bytes in JSON and 64 in memory.
MAX_CONTAINERS: Final = 2**18
#: Numbers, strings and keys in a JSON body; each takes up to 100 bytes in memory.
MAX_VALUES: Final = 2**22
#: Fields of all messages in a protobuf body. An empty message is 2 bytes on the wire, 60 in memory.
MAX_FIELDS: Final = 2**19
#: Members of a gzip body or frames of a zstd body: each costs as much as a thousand bytes.
MAX_COMPRESSED_FRAMES: Final = 1_000

# -- limits of a pass or a sample ----------------------------------------------------------------

#: Examples in one pass. The official client sends at most 1024.
MAX_DATUMS: Final = 2**14
#: Chunks of one prompt or example.
MAX_CHUNKS: Final = 2**14
#: Tensors of one example, and settings of one loss.
MAX_TENSORS: Final = 64
#: Provenance spans of one example.
MAX_SPANS: Final = 2**14
#: Characters in the name of a tensor, setting, loss or key.
MAX_NAME_CHARS: Final = 200

# -- limits of any other message -----------------------------------------------------------------

#: Characters of any string. Large enough for a whole configuration as one metadata value.
MAX_TEXT_CHARS: Final = 2**14
#: Items of any list: tags, stop strings, projects.
MAX_ITEMS: Final = 1_000
#: Keys of any object, such as metadata.
MAX_KEYS: Final = 1_000
#: Characters of all strings and keys of one field, plus one for each value.
MAX_FIELD_CHARS: Final = 2**16
#: Ids of fetched results in one poll.
MAX_RETRIEVED_IDS: Final = 50_000
#: Nodes of a custom loss. Engines have a lower limit and report it.
MAX_NODES: Final = 4_000

#: Fields that `check_fields` skips because they have other limits, by message type.
_SEPARATELY_LIMITED: Final[Mapping[str, frozenset[str]]] = {
    # Bounded by the body, and by the context of the model once they are tokens.
    "ChatRequest": frozenset({"messages", "tools", "response_format"}),
    "CompletionRequest": frozenset({"prompt"}),
    "CreateCustomLossRequest": frozenset({"graph"}),
    # May contain a traceback: shortened when it is stored, never rejected.
    "FinishSessionRequest": frozenset({"detail"}),
    "FuturesRetrieveRequest": frozenset({"retrieved_request_ids"}),
    "SampleRequest": frozenset({"prompt", "target_prompt_logprobs"}),
    # Its other parts were checked where it was made.
    "StoredSampleRequest": frozenset({"prompt", "target_prompt_logprobs", "controls"}),
}


def check_json(body: bytes) -> None:
    """`TooLarge` for a body that would become many times larger in memory."""
    if len(body) <= MIN_COUNTED_BYTES:
        return
    # Brackets and commas inside strings are counted too. Bodies of this size that are mostly
    # strings hold images in base64, which contains neither.
    containers = body.count(b"{") + body.count(b"[")
    if containers > MAX_CONTAINERS:
        raise TooLarge(
            f"the body has {containers} objects and lists; at most {MAX_CONTAINERS} are allowed."
        )
    values = body.count(b",") + containers
    if values > MAX_VALUES:
        raise TooLarge(
            f"the body has {values} values; at most {MAX_VALUES} are allowed. Send fewer or "
            "shorter examples in one request, or send protobuf."
        )


def check_protobuf(body: bytes, message: Descriptor) -> None:
    """`TooLarge` for protobuf with too many fields, counted without parsing it."""
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
    """`WireError` for NaN or infinity anywhere inside `value`."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WireError.at(
                loc,
                f"{value} is not a finite number. NaN and infinity are not allowed, nor are "
                "numbers beyond 1.8e308, which are read as infinity.",
                "finite_number",
            )
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            check_finite((*loc, position), item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_finite((*loc, str(key)[:MAX_NAME_CHARS]), item)


def check_fields(message: str, value: Mapping[str, Any]) -> None:
    """Check all fields of a message: general limits, then those of fields with separate limits."""
    skipped = _SEPARATELY_LIMITED.get(message, frozenset())
    for name, item in value.items():
        if name not in skipped:
            _add_size((name,), item, 0)
    if message == "ChatRequest":
        for name in skipped & value.keys():
            check_finite((name,), value[name])
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


def _add_size(loc: tuple[str | int, ...], value: Any, size: int) -> int:
    """`size` plus that of `value`. The JSON parser limits the depth of the recursion."""
    size += 1
    if isinstance(value, str):
        check_text(loc, value)
        size += len(value)
    elif isinstance(value, list):
        check_count(loc, len(value), MAX_ITEMS, "items")
        for position, item in enumerate(value):
            size = _add_size((*loc, position), item, size)
    elif isinstance(value, dict):
        check_count(loc, len(value), MAX_KEYS, "keys")
        for key, item in value.items():
            check_text((*loc, key[:MAX_NAME_CHARS]), key, MAX_NAME_CHARS)
            size = _add_size((*loc, key), item, size + len(key))
    elif isinstance(value, float):
        check_finite(loc, value)
    if size > MAX_FIELD_CHARS:
        raise WireError.at(
            loc[:1],
            f"more than {MAX_FIELD_CHARS} characters in total; that is the limit.",
            "too_long",
        )
    return size


def _count_fields(body: memoryview, message: Descriptor, count: int) -> int:
    """Counts fields up to the first invalid byte; the parser reports that one."""
    known = message.fields_by_number
    at, end = 0, len(body)
    while 0 <= at < end:
        key, at = read_varint(body, at)
        count += 1
        if count > MAX_FIELDS:
            raise TooLarge(
                f"the body has more than {MAX_FIELDS} fields, which is the limit. Send fewer "
                "examples in one request."
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

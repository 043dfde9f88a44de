"""
Schemathesis hooks that insert real ids; with random ids every request would end with a 404.

Loaded by schemathesis through SCHEMATHESIS_HOOKS; FUZZ_IDS holds the ids as JSON, by field name.
"""

import json
import os
from typing import Any
from zlib import crc32

import schemathesis

IDS: dict[str, list[str]] = json.loads(os.environ.get("FUZZ_IDS", "{}"))


def with_real_ids(values: Any) -> Any:
    """Inserts a real id into known fields in three of four cases; a hash of the values decides."""
    if not isinstance(values, dict):
        return values
    draw = crc32(repr(sorted(values.items(), key=lambda item: str(item[0]))).encode())
    for name, known in IDS.items():
        if name in values and draw % 4:
            values[name] = known[draw // 4 % len(known)]
    if isinstance(values.get("target"), dict):
        values["target"] = with_real_ids(values["target"])
    return values


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    return with_real_ids(body)


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    return with_real_ids(path_parameters)

"""Times in requests: a time that UTC cannot represent is rejected by name, in every time field."""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, get_args

import pytest
from pydantic import AwareDatetime, BaseModel

from tinkex.wire.base import StrictModel, time_from_text
from tinkex.wire.codec import decode_json
from tinkex.wire.errors import WireError
from wire.test_finite_numbers import wire_types


def request_times() -> Iterator[tuple[type, str]]:
    for one in wire_types():
        if not issubclass(one, BaseModel):
            continue
        for name, field in one.model_fields.items():
            # Requests may contain parts of responses, such as a cursor.
            reads_text = any(getattr(m, "func", None) is time_from_text for m in field.metadata)
            if reads_text or (issubclass(one, StrictModel) and is_time(field.annotation)):
                yield one, name


def is_time(annotation: Any) -> bool:
    times = (datetime, AwareDatetime)
    return annotation in times or any(is_time(part) for part in get_args(annotation))


TIMES = [*request_times()]


def test_all_time_fields_are_found() -> None:
    assert ("SessionSearchCursor", "last_created_at") in {(m.__name__, name) for m, name in TIMES}
    assert len(TIMES) >= 7


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
@pytest.mark.parametrize(("model", "name"), TIMES, ids=lambda part: getattr(part, "__name__", part))
def test_a_time_beyond_utc_is_refused_by_name(model: type, name: str, text: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_json(model, json.dumps({name: text}).encode())

    [found] = [error for error in caught.value.errors if error.loc == (name,)]
    assert "outside the years 1 to 9999 in UTC" in found.msg

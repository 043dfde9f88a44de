"""The settings of an engine survive the way to its process."""

import os
from pathlib import Path

import pytest

from tinkex.wire.engine_settings import EngineSettings


@pytest.mark.parametrize(
    "folder", [b"/models/tiny", "/models/Z\u00fcrich".encode(), b"/models/\xff"]
)
def test_folders_of_any_name_pass_through_json(folder: bytes) -> None:
    settings = EngineSettings(
        name="tiny", folder=Path(os.fsdecode(folder)), threads=2, spill_folder=Path("/tmp/spill")
    )
    text = settings.to_json()
    assert EngineSettings.from_json(text) == settings


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="max_sequences"):
        EngineSettings.from_json('{"name": "a", "folder": "/a", "max_sequences": "many"}')

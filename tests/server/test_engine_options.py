"""What a server is told about engines reaches them: settings, options of the process, the engine."""

import dataclasses
from pathlib import Path
from typing import Any

from tinkex.engine import EngineSettings
from tinkex.engine.process import parser, settings_of
from tinkex.server.engine_process import _command
from tinkex.server.executor import ServedModel
from tinkex.server.settings import CHOICES, Settings
from tinkex.server.web import _engine_options

SERVED = ServedModel(name="m", folder=Path("/models/m"))


def as_an_engine_hears(settings: Settings) -> EngineSettings:
    command = _command(7, SERVED, _engine_options(settings, [SERVED]))
    assert command[1:3] == ["-m", "tinkex.engine.process"]
    return settings_of(parser().parse_args(command[3:]))


def other(name: str, value: Any) -> Any:
    """A value that is not the default."""
    if name in CHOICES:
        return CHOICES[name][-1]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    return "other" if isinstance(value, str) else value


def test_every_setting_of_an_engine_can_be_set() -> None:
    """One that is new and forgotten on the way would keep its default."""
    changed = {
        field.name: other(field.name, field.default) for field in dataclasses.fields(Settings)
    }
    heard = as_an_engine_hears(Settings(**changed))
    unreachable = [
        field.name
        for field in dataclasses.fields(EngineSettings)
        if getattr(heard, field.name) == field.default
    ]
    assert not unreachable
    assert (heard.max_sequences, heard.idle_adapters, heard.prefix_cache) == (3, 19, False)
    assert heard.host_bytes == 3 * 10**9


def test_a_server_told_nothing_leaves_an_engine_its_defaults() -> None:
    heard = as_an_engine_hears(Settings(data="/data"))
    own = heard.spill_folder
    assert own is not None
    assert own.parent == Path("/data/spill")
    assert heard == EngineSettings(name="m", folder=SERVED.folder, spill_folder=own)


def test_no_adapter_may_be_kept_idle() -> None:
    assert as_an_engine_hears(Settings(idle_adapters=0)).idle_adapters == 0

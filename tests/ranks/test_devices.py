"""Which devices the ranks of an engine get."""

from pathlib import Path

import pytest

from tinkex.engine.device import UnusableDevice
from tinkex.engine.ranks.rank_settings import settings_of_rank
from tinkex.server.settings import Settings, SettingsError
from tinkex.wire.engine_settings import EngineSettings

FOUR = "cuda:0,cuda:1,cuda:2,cuda:3"


def test_each_engine_takes_as_many_devices_of_a_list_as_it_has_ranks() -> None:
    settings = Settings(device=FOUR, gpus_per_replica=2)
    assert settings.replicas_of_each(1) == 2
    assert [settings.device_of(engine) for engine in range(2)] == ["cuda:0,cuda:1", "cuda:2,cuda:3"]
    assert Settings(device=FOUR).device_of(3) == "cuda:3"
    assert Settings(gpus_per_replica=2).device_of(1) == "auto"
    made = EngineSettings(name="m", folder=Path(), ranks=2, device=settings.device_of(1))
    assert [settings_of_rank(made, rank).device for rank in range(2)] == ["cuda:2", "cuda:3"]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:0,cuda:0", "cuda"])
def test_ranks_without_a_device_of_their_own_are_refused(device: str) -> None:
    made = EngineSettings(name="m", folder=Path(), ranks=2, device=device)
    with pytest.raises(UnusableDevice, match="divided over 2 GPUs"):
        settings_of_rank(made, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(gpus_per_replica=0), "gpus_per_replica is 0"),
        (Settings(gpus_per_replica=3, device="cuda:0,cuda:1"), "2 devices .* engines of 3 GPUs"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(settings: Settings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings.check()

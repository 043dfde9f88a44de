"""Settings: where they come from, what is refused, and what is never printed."""

import pytest

from tinkex.server.settings import Settings, SettingsError


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    env = {"TINKEX_PORT": "9000", "TINKEX_HOST": "::1", "TINKEX_GAP_S": "1.5", "HOME": "/x"}
    settings = Settings.from_sources({"port": 7000, "host": None}, env)
    assert (settings.port, settings.host, settings.gap_s) == (7000, "::1", 1.5)
    assert settings.long_poll_s == 30.0


def test_the_data_folder_follows_the_platform() -> None:
    assert Settings.from_sources({}, {"XDG_DATA_HOME": "/d"}).data == "/d/tinkex"
    assert Settings.from_sources({}, {}).data.endswith("/.local/share/tinkex")
    assert Settings.from_sources({}, {"TINKEX_DATA": "/e"}).data == "/e"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_keys(host: str) -> None:
    Settings.from_sources({"host": host}, {}).check_reachable(has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_any_other_address_is_refused_without_keys(host: str) -> None:
    settings = Settings.from_sources({"host": host}, {})
    with pytest.raises(SettingsError, match="no keys") as refused:
        settings.check_reachable(has_keys=False)
    assert "127.0.0.1" in refused.value.hint
    assert "tinkex key create" in refused.value.hint
    settings.check_reachable(has_keys=True)


@pytest.mark.parametrize(
    ("name", "value"), [("port", 70000), ("threads", -1), ("executor", "cloud")]
)
def test_what_cannot_work_is_refused_at_the_start(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_sources({name: value}, {})


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("no", False)])
def test_a_switch_is_read_from_the_environment(text: str, meant: bool) -> None:
    assert Settings.from_sources({}, {"TINKEX_DETERMINISTIC": text}).deterministic is meant


def test_a_switch_that_is_neither_is_refused() -> None:
    with pytest.raises(SettingsError, match="TINKEX_DETERMINISTIC=banana"):
        Settings.from_sources({}, {"TINKEX_DETERMINISTIC": "banana"})


def test_a_number_that_is_none_names_its_variable() -> None:
    with pytest.raises(SettingsError, match="TINKEX_PORT=http"):
        Settings.from_sources({}, {"TINKEX_PORT": "http"})


def test_passwords_are_not_printed() -> None:
    settings = Settings(db="postgresql://me:secret@db/tinkex", storage="s3://key:hidden@bucket")
    printed = "\n".join(settings.lines())
    assert "secret" not in printed
    assert "hidden" not in printed
    assert "postgresql://me:***@db/tinkex" in printed


def test_settings_survive_the_way_to_another_process() -> None:
    settings = Settings(models=("a=b", "c"), port=1)
    assert Settings.from_json(settings.to_json()) == settings

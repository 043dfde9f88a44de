"""Settings: sources and their precedence, refused values, and passwords that are never printed."""

from pathlib import Path

import pytest

from tinkex.server.settings import Settings, SettingsError


def test_flags_override_the_environment_and_that_overrides_defaults() -> None:
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


@pytest.mark.parametrize(("name", "value"), [("port", 70000), ("threads", -1), ("dtype", "float8")])
def test_an_invalid_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_sources({name: value}, {})


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("no", False)])
def test_a_boolean_is_read_from_the_environment(text: str, expected: bool) -> None:
    assert Settings.from_sources({}, {"TINKEX_DETERMINISTIC": text}).deterministic is expected


def test_an_invalid_boolean_is_refused() -> None:
    with pytest.raises(SettingsError, match="TINKEX_DETERMINISTIC=banana"):
        Settings.from_sources({}, {"TINKEX_DETERMINISTIC": "banana"})


def test_an_invalid_number_names_its_variable() -> None:
    with pytest.raises(SettingsError, match="TINKEX_PORT=http"):
        Settings.from_sources({}, {"TINKEX_PORT": "http"})


def test_passwords_are_not_printed() -> None:
    settings = Settings(db="postgresql://me:secret@db/tinkex", storage="s3://key:hidden@bucket")
    printed = "\n".join(settings.lines())
    assert "secret" not in printed
    assert "hidden" not in printed
    assert "postgresql://me:***@db/tinkex" in printed


def test_changed_settings_are_one_line() -> None:
    settings = Settings(port=1, db="postgresql://me:secret@db/tinkex", jwt=True)
    assert settings.changed() == "port = 1, db = 'postgresql://me:***@db/tinkex', jwt = True"


def test_an_unreadable_data_folder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(SettingsError, match=f"{tmp_path} cannot be read by this user") as refused:
        Settings.from_sources({"data": str(tmp_path)}, {})
    assert "user that runs the server" in refused.value.hint


def test_settings_survive_the_json_round_trip() -> None:
    settings = Settings(models=("a=b", "c"), port=1)
    assert Settings.from_json(settings.to_json()) == settings


def written(folder: Path, text: str) -> Path:
    file = folder / "tinkex.toml"
    file.write_text(text)
    return file


def test_flags_and_environment_override_the_file_in_the_data_folder(tmp_path: Path) -> None:
    written(tmp_path, 'port = 1\nlong_poll_s = 2\nmodels = ["a", "b=c"]\njwt = true\ngap_s = 3')
    env = {"TINKEX_DATA": str(tmp_path), "TINKEX_GAP_S": "4"}
    settings = Settings.from_sources({"port": 9}, env)
    assert (settings.port, settings.gap_s, settings.long_poll_s) == (9, 4.0, 2.0)
    assert settings.models == ("a", "b=c")
    assert settings.jwt is True
    assert settings.config == str(tmp_path / "tinkex.toml")
    assert any("tinkex.toml" in line for line in settings.lines())


def test_a_given_file_may_set_the_data_folder(tmp_path: Path) -> None:
    file = written(tmp_path, f'data = "{tmp_path / "elsewhere"}"')
    settings = Settings.from_sources({"config": str(file)}, {})
    assert settings.folder == tmp_path / "elsewhere"
    assert Settings.from_sources({}, {"TINKEX_CONFIG": str(file)}).folder == settings.folder


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("\nprot = 1", "line 2: prot is not a setting", "Did you mean port?"),
        ("port = 1\n\ngap_s = true", "line 3: gap_s = True is not a number", "gap_s = 1.5"),
        ('port = "8000"', "line 1: port = '8000' is not an integer", "port = 8"),
        ("models = [1]", "line 1: models = [1] is not a list of strings", 'models = ["text"]'),
        ("jwt = 1", "line 1: jwt = 1 is not a boolean", "jwt = true"),
        ("# limits\n[limits]\na = 1", "line 2: limits is not a setting", ""),
        ("port =", "is not TOML", "port = 8000"),
        ("port = 70000", "line 1: port 70000 is not a valid port", "1 to 65535"),
        ("\n\nmax_samples = -1", "line 3: max_samples -1 is negative", "0 or more"),
        ('dtype = "float8"', "line 1: dtype float8 is not a known value", "`bfloat16`"),
        ('data = "/x"', "line 1: the settings file in a data folder", "--config"),
    ],
)
def test_an_error_in_the_file_names_its_line(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        Settings.from_sources({"data": str(tmp_path)}, {})
    assert message in str(refused.value)
    assert str(file) in str(refused.value)
    assert hint in refused.value.hint


def test_an_invalid_value_names_its_variable() -> None:
    with pytest.raises(SettingsError, match="TINKEX_PORT: port 70000 is not a valid port"):
        Settings.from_sources({}, {"TINKEX_PORT": "70000"})


def test_a_given_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        Settings.from_sources({"config": str(tmp_path / "no.toml")}, {})

"""Where settings come from, and that keys stay out of sight."""

import copy
import json
import pickle

import pytest

from tinkex import TinkerError
from tinkex.client.settings import ApiKey, Settings, is_loopback, normalise_url

KEY = "tml-secret-0123456789"


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://Host.Example:80/", "http://host.example"),
        ("https://host.example:443/a/b//", "https://host.example/a/b"),
        ("https://host.example:8443", "https://host.example:8443"),
        ("HTTP://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("local", "local"),
    ],
)
def test_a_service_has_one_spelling(given, normal):
    assert normalise_url(given) == normal


@pytest.mark.parametrize("bad", ["", "host", "ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused_with_what_to_write(bad):
    with pytest.raises(TinkerError, match="http://HOST:PORT"):
        normalise_url(bad)


def test_our_names_win_over_the_official_ones_and_arguments_over_both(tmp_path):
    env = {
        "TINKER_BASE_URL": "https://a.example",
        "TINKEX_BASE_URL": "https://b.example",
        "TINKER_API_KEY": KEY,
        "TINKEX_TAGS": "x, y,x,",
        "TINKER_TELEMETRY": "off",
        "CLOUDFLARE_ACCESS_CLIENT_ID": "cf",
    }
    settings = Settings.resolve(env=env, home=tmp_path)
    assert settings.base_url == "https://b.example"
    assert settings.api_key == ApiKey(KEY)
    assert settings.tags == ("x", "y")
    assert not settings.telemetry
    assert settings.headers == {"CF-Access-Client-Id": "cf"}
    assert Settings.resolve(base_url="http://c.example/", env=env).base_url == "http://c.example"


def test_an_empty_variable_counts_as_unset(tmp_path):
    env = {"TINKEX_BASE_URL": "", "TINKER_BASE_URL": "https://a.example", "TINKER_API_KEY": KEY}
    assert Settings.resolve(env=env, home=tmp_path).base_url == "https://a.example"


def test_a_missing_key_is_reported_as_that_with_the_ways_to_give_one(tmp_path):
    with pytest.raises(TinkerError, match=r"No API key for https://a\.example.*TINKER_API_KEY"):
        Settings.resolve(base_url="https://a.example", env={}, home=tmp_path)


@pytest.mark.parametrize("url", ["local", "http://127.0.0.1:1", "http://localhost", "http://[::1]"])
def test_a_server_on_this_machine_needs_no_key(url, tmp_path):
    assert is_loopback(url)
    assert Settings.resolve(base_url=url, env={}, home=tmp_path).api_key is None


def test_a_malformed_key_is_refused_without_being_shown(tmp_path):
    with pytest.raises(TinkerError, match="must start with 'tml-'") as caught:
        Settings.resolve(base_url="http://a", api_key="sk-hidden", env={}, home=tmp_path)
    assert "hidden" not in str(caught.value)


def test_the_stored_default_key_is_the_last_resort(tmp_path):
    folder = tmp_path / ".tinker"
    folder.mkdir()
    (folder / "credentials.json").write_text(
        json.dumps({"version": 1, "default": "k", "keys": {"k": {"type": "manual", "key": KEY}}})
    )
    found = Settings.resolve(base_url="https://a", env={}, home=tmp_path)
    assert found.api_key == ApiKey(KEY)
    # It belongs to the hosted service: a local server never sees it.
    assert Settings.resolve(base_url="local", env={}, home=tmp_path).api_key is None


def test_a_broken_credentials_file_is_named(tmp_path):
    (tmp_path / ".tinker").mkdir()
    (tmp_path / ".tinker" / "credentials.json").write_text("[")
    with pytest.raises(TinkerError, match=r"credentials\.json cannot be read"):
        Settings.resolve(base_url="https://a", env={}, home=tmp_path)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_patience_that_is_no_number_is_refused(text, tmp_path):
    with pytest.raises(TinkerError, match="FIRST_CONTACT_S"):
        Settings.resolve(base_url="local", env={"TINKEX_FIRST_CONTACT_S": text}, home=tmp_path)


def test_a_key_does_not_print():
    settings = Settings(base_url="http://a", api_key=ApiKey(KEY), headers={"X-Secret": KEY})
    assert KEY not in repr(settings)
    assert KEY not in f"{settings.api_key}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(settings)
    assert copy.deepcopy(settings) == settings


def test_limits_are_shared_by_url_and_key_and_by_nothing_less():
    a = Settings(base_url="http://a", api_key=ApiKey(KEY))
    assert a.lane == Settings(base_url="http://a", api_key=ApiKey(KEY), project_id="p").lane
    assert a.lane != Settings(base_url="http://b", api_key=ApiKey(KEY)).lane
    assert a.lane != Settings(base_url="http://a", api_key=ApiKey(KEY + "1")).lane
    assert KEY not in str(a.lane)

"""Where settings come from; keys are never shown."""

import copy
import dataclasses
import json
import os
import pickle
import time

import pytest

import tinkex
from tinkex import TinkerError, types
from tinkex.client.auth.key_store import StoredKey, StoredKeys, default_path, write
from tinkex.client.settings import DEFAULT_URL, ApiKey, Settings, is_loopback, normalize_url
from tinkex.testing import Answer, FakeService, Loopback

KEY = "tml-secret-0123456789"
SLOW = {"retry-after": "2"}


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
def test_addresses_are_normalized(given, normal):
    assert normalize_url(given) == normal


@pytest.mark.parametrize(
    "bad", ["", "host", "ftp://host", "http://", "http://host:port", "http://[::1"]
)
def test_an_invalid_address_is_refused_with_what_to_write(bad):
    with pytest.raises(TinkerError, match="http://HOST:PORT"):
        normalize_url(bad)


def test_a_password_in_an_address_is_refused_and_not_shown():
    with pytest.raises(TinkerError, match="default_headers_overrides") as caught:
        normalize_url("https://user:hidden@host.example")
    assert "hidden" not in str(caught.value)


def test_tinkex_variables_win_over_official_ones_and_arguments_over_both(tmp_path):
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


def test_a_missing_key_is_reported_with_how_to_set_one(tmp_path):
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
    with pytest.raises(TinkerError, match=r"credentials\.json is not a valid credentials file"):
        Settings.resolve(base_url="https://a", env={}, home=tmp_path)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_an_invalid_time_limit_is_refused(text, tmp_path):
    with pytest.raises(TinkerError, match="FIRST_CONTACT_S"):
        Settings.resolve(base_url="local", env={"TINKEX_FIRST_CONTACT_S": text}, home=tmp_path)


def test_a_key_does_not_print():
    settings = Settings(base_url="http://a", api_key=ApiKey(KEY), headers={"X-Secret": KEY})
    assert KEY not in repr(settings)
    assert KEY not in f"{settings.api_key}"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(settings)
    assert copy.deepcopy(settings) == settings


def test_limits_are_shared_by_url_and_key_only():
    a = Settings(base_url="http://a", api_key=ApiKey(KEY))
    assert (
        a.limits_key
        == Settings(base_url="http://a", api_key=ApiKey(KEY), project_id="p").limits_key
    )
    assert a.limits_key != Settings(base_url="http://b", api_key=ApiKey(KEY)).limits_key
    assert a.limits_key != Settings(base_url="http://a", api_key=ApiKey(KEY + "1")).limits_key
    assert KEY not in str(a.limits_key)


# -- H10: one frozen object --------------------------------------------------------------------------


def test_h10_arguments_win_over_the_environment_over_the_file_over_defaults(tmp_path):
    stored = StoredKeys().with_key("1", StoredKey(key=ApiKey("tml-stored"))).with_default("1")
    write(default_path(tmp_path), stored)
    env = {"TINKER_API_KEY": "tml-env", "TINKER_GIVE_UP_S": "7", "TINKER_BASE_URL": "https://env"}

    def resolved(env, **arguments):
        found = Settings.resolve(env=env, home=tmp_path, **arguments)
        return found.base_url, found.api_key.value, found.give_up_s

    assert resolved({}) == (DEFAULT_URL, "tml-stored", 300.0)
    assert resolved(env) == ("https://env", "tml-env", 7.0)
    given = {"base_url": "https://arg", "api_key": "tml-arg", "give_up_s": 9}
    assert resolved(env, **given) == ("https://arg", "tml-arg", 9.0)


def test_h10_every_variable_of_the_official_client_is_read_under_both_names(tmp_path):
    common = {
        "API_KEY": KEY,
        "CREDENTIAL_CMD": "echo tml-x",
        "BASE_URL": "https://a.example/",
        "PROJECT_ID": "p",
        "TAGS": " b ,a,, b",
        "TELEMETRY": "0",
        "FEATURE_GATES": "x, y",
    }
    for prefix in ("TINKER_", "TINKEX_"):
        env = {prefix + name: value for name, value in common.items()}
        found = Settings.resolve(env=env, home=tmp_path)
        assert found.api_key == ApiKey(KEY)
        assert found.credential_cmd == "echo tml-x"
        assert found.base_url == "https://a.example"
        assert found.project_id == "p"
        assert found.tags == ("b", "a")  # stripped, without duplicates, in order
        assert not found.telemetry
        assert found.feature_gates == ("x", "y")
        assert "echo" not in repr(found)
    empty = {"TINKER_TAGS": "", "TINKER_FEATURE_GATES": "", "TINKER_PROJECT_ID": ""}
    found = Settings.resolve(base_url="local", env=empty, home=tmp_path)
    assert (found.tags, found.project_id) == ((), None)
    assert found.feature_gates == ("async_sampling",)


def test_h10_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().base_url = "http://a"
    with pytest.raises(TypeError):
        Settings.resolve(base_url="local", env={}).headers["X"] = "y"


def test_h10_a_wrong_argument_is_named(tmp_path):
    with pytest.raises(TinkerError, match="give_up_s=-1 is not"):
        Settings.resolve(base_url="local", give_up_s=-1, env={}, home=tmp_path)


class Watched(dict):
    """An environment that records which code reads it."""

    def __init__(self, env):
        super().__init__(env)
        self.asked = []

    def __getitem__(self, name):
        self.asked.append(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.asked.append(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.asked.append(name)
        return super().__contains__(name)


def test_h10_nothing_reads_the_environment_again_once_a_client_works(fake, datum, monkeypatch):
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model")
        sampling = service.create_sampling_client(base_model="fake/model")
        prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)

        def work():
            training.forward_backward([datum], "cross_entropy").result(5)
            training.optim_step(types.AdamParams()).result(5)
            sampling.sample(prompt, 1, params).result(5)

        work()  # lazy imports may read it
        watched = Watched(os.environ)
        monkeypatch.setattr(os, "environ", watched)
        work()
        assert watched.asked == []


def test_h8_equal_addresses_share_limits_and_different_ones_do_not(tmp_path):
    def key(url, key=KEY):
        return Settings.resolve(base_url=url, api_key=key, env={}, home=tmp_path).limits_key

    assert key("https://Host.example:443/a/") == key("https://host.example/a")
    assert key("https://host.example/a") != key("https://host.example/b")
    assert key("https://host.example/a") != key("https://host.example/a", KEY + "2")


def test_h8_two_services_in_one_process_share_neither_pools_nor_limits_nor_telemetry():
    with Loopback(FakeService()) as here, Loopback(FakeService()) as there:
        a = tinkex.ServiceClient(base_url=here.url, api_key="tml-a")
        b = tinkex.ServiceClient(base_url=there.url, api_key="tml-b")
        c = tinkex.ServiceClient(base_url=here.url + "/", api_key="tml-c")
        for service in (a, b, c):
            service.create_lora_training_client("fake/model")
        found = [service.holder._connected.value for service in (a, b, c)]
        for part in ("transport", "limits", "calls"):
            assert len({id(getattr(each, part)) for each in found}) == 3
        # The rate-limited client waits; another service or another key does not.
        here.fake.script("get_server_capabilities", Answer(status=429, headers=SLOW))
        waiting = a._get_server_capabilities()
        while not found[0].limits.backoff.left_s:
            time.sleep(0.005)
        b.get_server_capabilities()
        c.get_server_capabilities()
        assert not waiting.done()
        assert waiting.result(10).supported_models
        sessions = [service.holder.session_id for service in (a, b, c)]
        for service in (a, b, c):
            service.close("success").result(5)
    assert {seen.headers["x-api-key"] for seen in there.fake.requests} == {"tml-b"}
    assert {seen.headers["x-api-key"] for seen in here.fake.requests} == {"tml-a", "tml-c"}
    reported = {
        (seen.headers["x-api-key"], seen.json()["session_id"])
        for fake in (here.fake, there.fake)
        for seen in fake.requests
        if seen.endpoint == "telemetry"
    }
    assert reported == set(zip(("tml-a", "tml-b", "tml-c"), sessions, strict=True))

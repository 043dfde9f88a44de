"""`tinkex.auth` (§14), and services that fail at first contact (defects 8 and 10)."""

import asyncio
import time

import pytest

import tinkex
from tinkex import auth
from tinkex.client.auth.credentials import ApiKey
from tinkex.client.auth.key_store import StoredKey, StoredKeys, default_path, write
from tinkex.client.http import backpressure
from tinkex.testing import Answer, FakeService

KEY = "tml-0123456789"


@pytest.fixture(autouse=True)
def _blank(monkeypatch, tmp_path):
    for name in ("API_KEY", "BASE_URL", "CREDENTIAL_CMD"):
        monkeypatch.delenv(f"TINKER_{name}", raising=False)
        monkeypatch.delenv(f"TINKEX_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_configuration_there_are_no_credentials():
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()
    with pytest.raises(tinkex.TinkerError, match="no tinkex server of this user runs"):
        auth.raise_if_tinker_not_accessible()


def test_a_key_in_the_environment_or_the_file_is_found(monkeypatch, tmp_path):
    stored = StoredKeys().with_key("1", StoredKey(key=ApiKey("tml-stored"))).with_default("1")
    write(default_path(tmp_path), stored)
    assert auth.get_tinker_token() == "tml-stored"
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert auth.get_tinker_token() == KEY
    assert auth.tinker_has_credentials()


def test_a_command_counts_and_is_not_run(monkeypatch, tmp_path):
    ran = tmp_path / "ran"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {ran}; echo {KEY}")
    assert auth.get_tinker_token() is None
    assert auth.tinker_has_credentials()
    assert not ran.exists()
    monkeypatch.setenv("TINKER_API_KEY", "sk-wrong")  # falls back to the command
    assert auth.get_tinker_token() is None
    assert auth.tinker_has_credentials()


def test_malformed_keys_and_files_do_not_count_as_credentials(monkeypatch, tmp_path):
    default_path(tmp_path).parent.mkdir()
    default_path(tmp_path).write_text("{")
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()
    monkeypatch.setenv("TINKER_API_KEY", "sk-wrong")
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()


def test_a_local_service_needs_no_key(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:8000")
    assert auth.tinker_has_credentials()
    assert auth.get_tinker_token() is None


def test_a_responding_service_is_accessible(fake, loopback, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", loopback.url)
    auth.raise_if_tinker_not_accessible()
    assert [seen.endpoint for seen in fake.requests] == [
        "client/config",
        "client/dynamic_config",
        "get_server_capabilities",
    ]
    fake.script("get_server_capabilities", Answer(status=500))
    with pytest.raises(tinkex.InternalServerError):  # sent once
        auth.raise_if_tinker_not_accessible()

    async def on_a_loop():
        auth.raise_if_tinker_not_accessible()

    with pytest.warns(RuntimeWarning, match="asyncio.to_thread"):
        asyncio.run(on_a_loop())


def test_defect_10_an_unreachable_service_fails_within_the_first_contact(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.3")
    began = time.monotonic()
    with pytest.raises(tinkex.APIConnectionError, match="Check that the server is running"):
        auth.raise_if_tinker_not_accessible()
    assert time.monotonic() - began < 3


def test_defect_10_a_service_that_keeps_failing_at_first_contact_is_given_up_equally_early(
    fake, loopback, monkeypatch
):
    monkeypatch.setenv("TINKER_BASE_URL", loopback.url)
    monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.3")
    fake.script("client/config", *[Answer(status=503)] * 500)
    began = time.monotonic()
    with pytest.raises(tinkex.InternalServerError):
        auth.raise_if_tinker_not_accessible()
    assert time.monotonic() - began < 3


def test_client_settings_can_be_set_in_code(fake):
    settings = tinkex.Settings.resolve(
        base_url="http://service.invalid", api_key=KEY, first_contact_s=1, give_up_s=2, tags=["a"]
    )
    with tinkex.ServiceClient(settings=settings, _make_transport=fake.transport) as service:
        service.create_lora_training_client("fake/model")
        assert service.holder.settings.first_contact_s == 1
    created = next(seen for seen in fake.requests if seen.endpoint == "create_session")
    assert created.json()["tags"] == ["a"]
    with pytest.raises(ValueError, match="settings together with base_url"):
        tinkex.ServiceClient(base_url="local", settings=settings)


# -- billing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["client/config", "auth/token", "client/dynamic_config", "create_session"]
)
def test_defect_8_a_402_while_a_client_starts_is_a_pause(endpoint, monkeypatch):
    from client.test_token_exchange import given, jwt

    monkeypatch.setattr(backpressure, "BILLING_PAUSE_S", 0.01)
    fake = FakeService(config={"pjwt_auth_enabled": True})
    fake.script(endpoint, Answer(status=402, body={"detail": "no funds"}), Answer(status=402))
    fake.script("auth/token", given(jwt()))
    with fake.client() as service:
        service.create_lora_training_client("fake/model")
    assert [seen.endpoint for seen in fake.requests].count(endpoint) == 3


def test_defect_8_a_402_that_stays_is_a_billing_error_at_the_start_too(monkeypatch, caplog):
    monkeypatch.setattr(backpressure, "BILLING_PAUSE_S", 0.01)
    monkeypatch.setattr(backpressure.BillingPause.__init__, "__defaults__", (0.1, time.monotonic))
    fake = FakeService()
    fake.script("client/config", *[Answer(status=402, body={"detail": "no funds"})] * 1000)
    monkeypatch.setenv("TINKEX_WAIT_NOTICE_S", "0.02")
    service = fake.client(api_key="tml-in-a-lane-of-its-own")
    with caplog.at_level("WARNING"), pytest.raises(tinkex.BillingError, match="no funds"):
        service.get_server_capabilities()
    service.close("errored").result(5)
    [line] = [record.getMessage() for record in caplog.records if "waiting" in record.name]
    assert line.startswith("http://fake.invalid: no funds. Trying for 0 s more. ")

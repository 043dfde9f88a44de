"""The file of stored keys (§2.3)."""

import json
import os
import stat
import subprocess

import pytest

import sdk_envs
from tinkex import TinkerError
from tinkex.client.auth.credentials import ApiKey
from tinkex.client.auth.key_store import StoredKey, StoredKeys, default_path, read, write
from tinkex.client.settings import DEFAULT_URL, Settings

KEY = "tml-stored-0123456789"
OTHER = "http://127.0.0.1:8000"


def test_written_keys_are_read_again_and_only_by_their_owner(tmp_path):
    path = default_path(tmp_path)
    stored = StoredKeys().with_key(
        "7",
        StoredKey(
            key=ApiKey(KEY),
            type="generated",
            name="laptop",
            details={"org_details": {"name": "o"}, "user_details": {"email": "e"}},
        ),
    )
    stored = stored.with_default("7")
    write(path, stored)
    assert read(path) == stored
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["credentials.json"]
    assert json.loads(path.read_text()) == {
        "version": 1,
        "default": "7",
        "keys": {
            "7": {
                "type": "generated",
                "key": KEY,
                "name": "laptop",
                "details": {"org_details": {"name": "o"}, "user_details": {"email": "e"}},
            }
        },
    }
    assert KEY not in repr(stored)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = default_path(tmp_path)
    write(path, StoredKeys().with_key("1", StoredKey(key=ApiKey(KEY))))
    before = path.read_bytes()
    broken = StoredKeys().with_key("3", StoredKey(key=ApiKey(KEY), details={"x": object()}))
    with pytest.raises(TypeError):
        write(path, broken)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["credentials.json"]


def test_deleting_the_default_key_clears_the_default_and_unknown_ids_are_errors():
    stored = StoredKeys().with_key("1", StoredKey(key=ApiKey(KEY))).with_default("1")
    assert stored.without("1") == StoredKeys()
    with pytest.raises(KeyError):
        stored.without("2")
    with pytest.raises(KeyError):
        stored.with_default("2")


def test_a_missing_file_means_no_keys(tmp_path):
    assert read(default_path(tmp_path)) == StoredKeys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "not JSON at line 1"),
        ("[]", "AttributeError"),
        ('{"version": 2, "keys": {}}', "supports version 1"),
        ('{"keys": {"1": {"type": "manual"}}}', "a key without 'key'"),
        ('{"keys": {"1": {"type": "odd", "key": "tml-hidden"}}}', "neither 'manual' nor"),
        ('{"default": "9", "keys": {}}', "the default is not one of its keys"),
        ('{"keys": {"1": {"type": "manual", "key": "tml-hidden" x', "not JSON"),
    ],
)
def test_a_malformed_file_is_named_without_its_contents(tmp_path, text, words):
    path = default_path(tmp_path)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(TinkerError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert "Fix or delete" in str(caught.value)


def test_h8_a_stored_key_is_sent_only_to_the_service_it_belongs_to(tmp_path):
    stored = (
        StoredKeys()
        .with_key("1", StoredKey(key=ApiKey("tml-hosted"), base_url=DEFAULT_URL))
        .with_key("2", StoredKey(key=ApiKey("tml-own"), base_url=OTHER))
        .with_default("1")
    )
    write(default_path(tmp_path), stored)

    def key_for(url):
        found = Settings.resolve(base_url=url, env={}, home=tmp_path).api_key
        return found and found.value

    assert key_for(None) == "tml-hosted"
    assert key_for(OTHER + "/") == "tml-own"
    assert key_for("http://127.0.0.1:8001") is None
    with pytest.raises(TinkerError, match="No API key"):
        key_for("https://elsewhere.example")


@pytest.mark.sdk
def test_the_file_is_compatible_with_the_official_client(tmp_path):
    stored = (
        StoredKeys()
        .with_key("1", StoredKey(key=ApiKey(KEY), name="one", base_url=DEFAULT_URL))
        .with_key("2@h", StoredKey(key=ApiKey("tml-other"), name="two", note="n", base_url=OTHER))
        .with_default("1")
    )
    write(default_path(tmp_path), stored)
    python = str(sdk_envs.ensure("0.36.0"))
    env = {**os.environ, "HOME": str(tmp_path), "TINKER_API_KEY": ""}

    def official(*args):
        return subprocess.run(
            [python, *args], env=env, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    shown = official("-c", "import tinker; print(tinker.auth.get_tinker_token())")
    assert shown.strip() == KEY
    official("-m", "tinker.cli", "auth", "logout")
    left = read(default_path(tmp_path))
    assert left.default is None
    assert {key_id: key.key.value for key_id, key in left.keys.items()} == {"2@h": "tml-other"}

"""Which credential is used (§2.2), and commands that print one."""

import asyncio
import sys
import time

import pytest

from processes import has_exited
from tinkex import TinkerError
from tinkex.client.auth import credentials
from tinkex.client.auth.credentials import ApiKey, Command, CommandCredential, resolve, run_command
from tinkex.client.settings import Settings
from tinkex.testing import FakeService

KEY = ApiKey("tml-0123456789")
TOKEN = ApiKey("eyJhbGciOiJub25lIn0.e30.x")
WRONG = ApiKey("sk-hidden")
SAY = Command("echo tml-printed")


@pytest.mark.parametrize(
    ("key", "command", "enforce", "found"),
    [
        (TOKEN, "cmd", True, TOKEN),  # a token is used even where a command is enforced
        (KEY, "cmd", True, Command("cmd")),
        (None, "cmd", True, Command("cmd")),
        (KEY, "cmd", False, KEY),
        (KEY, None, False, KEY),
        (WRONG, "cmd", False, Command("cmd")),
        (None, "cmd", False, Command("cmd")),
    ],
)
def test_h10_which_credential_is_used(key, command, enforce, found):
    assert resolve(key, command, service="https://a", enforce_cmd=enforce) == found


@pytest.mark.parametrize(
    ("key", "enforce", "words"),
    [
        (KEY, True, "requires credentials from a command"),
        (None, True, "TINKER_CREDENTIAL_CMD"),
        (WRONG, False, "must start with 'tml-'"),
        (ApiKey("tml-a b"), False, "a header cannot contain"),
        (ApiKey("tml-a\nX-Evil: 1"), False, "a header cannot contain"),
        (None, False, "No API key for https://a"),
    ],
)
def test_e4_a_missing_or_malformed_key_is_reported_with_what_to_do(key, enforce, words):
    with pytest.raises(TinkerError, match=words) as caught:
        resolve(key, None, service="https://a", enforce_cmd=enforce)
    assert "TINKER_" in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_no_key_is_used_where_none_is_needed():
    assert resolve(None, None, service="local", needed=False) is None


# -- commands ----------------------------------------------------------------------------------------


def printed(text, limit_s=10.0):
    return asyncio.run(run_command(Command(text), limit_s=limit_s))


def test_a_command_runs_through_the_shell_and_its_output_is_stripped():
    assert printed("printf ' tml-%s \\n' $((40 + 2))") == "tml-42"
    # Only static keys need a prefix.
    assert printed("echo secret-of-another-kind") == "secret-of-another-kind"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo tml-leak; echo asking >&2; echo 'no such vault' >&2; exit 3", "status 3: no such"),
        ("echo tml-leak; echo 'bad tml-leak' >&2; exit 1", r"bad \*\*\*"),
        ("echo tml-leak; exit 4", "status 4 and printed nothing"),
        ("echo 'not logged in' >&2", "nothing on stdout: not logged in"),
        ("echo tml-leak; echo second", "a header cannot contain"),
    ],
)
def test_a_failing_command_is_reported_with_its_stderr_and_never_with_its_output(text, words):
    with pytest.raises(TinkerError, match=words) as caught:
        printed(text)
    assert "TINKER_CREDENTIAL_CMD" in str(caught.value)
    assert "leak" not in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    mark = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(TinkerError, match=r"within 0\.5 s"):
        printed(f"sh -c 'echo $$ > {mark}; sleep 60; true'; true", limit_s=0.5)
    assert time.monotonic() - began < 5
    assert has_exited(int(mark.read_text()), within_s=5)


def test_a_command_does_not_block_the_loop_and_runs_once_for_all_callers(tmp_path):
    ran = tmp_path / "ran"
    credential = CommandCredential(
        Command(f"echo x >> {ran}; sleep 0.2; echo tml-printed"), limit_s=10, clock=time.monotonic
    )

    async def main():
        asked = asyncio.gather(*(credential.token() for _ in range(20)))
        ticks = 0
        while not asked.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return await asked, ticks

    tokens, ticks = asyncio.run(main())
    assert set(tokens) == {"tml-printed"}
    assert ticks >= 5
    assert ran.read_text() == "x\n"


def test_command_output_is_cached_for_a_minute_and_renewed_after_a_401(tmp_path):
    now = [0.0]
    count = tmp_path / "count"
    credential = CommandCredential(
        Command(f"echo x >> {count}; echo tml-$(wc -l < {count} | tr -d ' ')"),
        limit_s=10,
        clock=lambda: now[0],
    )

    async def main():
        assert await credential.token() == "tml-1"
        now[0] = credentials.COMMAND_CACHE_S - 1
        assert await credential.token() == "tml-1"
        now[0] = credentials.COMMAND_CACHE_S + 1
        assert await credential.token() == "tml-2"
        assert await credential.renew("tml-2")
        assert await credential.token() == "tml-3"
        assert await credential.renew("tml-2")  # already renewed: not run again
        assert await credential.token() == "tml-3"

    asyncio.run(main())


def keys_seen(fake: FakeService) -> list[str | None]:
    return [seen.headers.get("x-api-key") for seen in fake.requests]


def test_a_client_sends_what_the_command_prints(monkeypatch):
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", SAY.text)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    fake = FakeService()
    with fake.client(api_key=None) as service:
        service.get_server_capabilities()
    assert set(keys_seen(fake)) == {"tml-printed"}


def test_a_failing_command_fails_the_call_at_once(monkeypatch):
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo 'vault is sealed' >&2; exit 2")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    fake = FakeService()
    service = fake.client(api_key=None)
    began = time.monotonic()
    with pytest.raises(TinkerError, match="vault is sealed"):
        service.get_server_capabilities()
    assert time.monotonic() - began < 5
    assert fake.requests == []
    service.close("errored").result(5)


def test_clients_with_the_same_command_share_limits():
    a = Settings(base_url="http://a", credential_cmd="x")
    assert a.limits_key == Settings(base_url="http://a", credential_cmd="x").limits_key
    assert a.limits_key != Settings(base_url="http://a", credential_cmd="y").limits_key
    assert a.limits_key != Settings(base_url="http://a").limits_key

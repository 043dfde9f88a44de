"""Keys are exchanged for tokens (§2.2): cached, renewed early, with one exchange at a time."""

import asyncio
import base64
import json
import logging
import time

import pytest

import tinkex
from tinkex.client.auth import token_exchange
from tinkex.client.auth.token_exchange import CachedToken, ExchangedToken, lifetime_s, read_claims
from tinkex.client.settings import Settings
from tinkex.testing import Answer, FakeService


def jwt(name="a", *, lasts_s=3600.0, now_s=None, **claims):
    now_s = time.time() if now_s is None else now_s
    body = {"iss": "passport-fake", "sub": name, "exp": now_s + lasts_s, **claims}
    middle = base64.urlsafe_b64encode(json.dumps(body).encode()).rstrip(b"=").decode()
    return f"eyJhbGciOiJub25lIn0.{middle}.signature"


class Bank:
    """A service that issues tokens, with the test's clock."""

    def __init__(self, lasts_s=3600.0):
        self.now_s = 1000.0
        self.lasts_s = lasts_s
        self.given = 0
        self.insisted = []
        self.closed = False
        self.gate = None

    async def exchange(self, insist):
        self.insisted.append(insist)
        if self.gate is not None:
            await self.gate.wait()
        if self.closed:
            raise tinkex.TinkerError("closed")
        self.given += 1
        return jwt(str(self.given), lasts_s=self.lasts_s, now_s=self.now_s)

    def credential(self):
        return ExchangedToken(self.exchange, clock=lambda: self.now_s)


async def subject(credential):
    return (await credential.claims())["sub"]


def test_a_token_is_cached_while_more_than_a_minute_is_left():
    async def main():
        bank = Bank()
        credential = bank.credential()
        assert await subject(credential) == "1"
        bank.now_s += 3600 - 61
        assert await subject(credential) == "1"
        bank.now_s += 2
        assert await subject(credential) == "2"
        assert bank.insisted == [True, False]

    asyncio.run(main())


def test_concurrent_callers_share_one_exchange():
    async def main():
        bank = Bank()
        bank.gate = asyncio.Event()
        credential = bank.credential()
        asked = [asyncio.create_task(credential.token()) for _ in range(50)]
        await asyncio.sleep(0)
        asked[0].cancel()  # a cancelled caller does not cancel it for the others
        bank.gate.set()
        assert len(set(await asyncio.gather(*asked[1:]))) == 1
        assert bank.given == 1

    asyncio.run(main())


def test_a_failed_renewal_returns_the_old_token_with_one_warning(caplog):
    async def main():
        bank = Bank()
        credential = bank.credential()
        old = await credential.token()
        bank.now_s += 3600 - 30
        bank.closed = True
        assert [await credential.token() for _ in range(3)] == [old] * 3
        bank.closed = False
        assert await credential.token() != old

    with caplog.at_level(logging.WARNING, "tinkex"):
        asyncio.run(main())
    assert [record.message for record in caplog.records] == [
        "the token was not renewed, so the old one is used: closed"
    ]


def test_without_an_old_token_the_error_is_raised():
    async def main():
        bank = Bank()
        bank.closed = True
        with pytest.raises(tinkex.TinkerError, match="closed"):
            await bank.credential().token()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("lifetime", "left", "fresh", "renew_in"),
    [
        (3600, 3600, True, 3300),
        (3600, 61, True, 1),
        (3600, 59, False, 1),
        (120, 100, True, 40),
        (
            10,
            9,
            True,
            4,
        ),  # short-lived ones keep a fifth as a margin, and are not renewed in a busy loop
        (10, 1.5, False, 1),
    ],
)
def test_when_a_token_is_renewed(lifetime, left, fresh, renew_in):
    held = CachedToken(text="t", until_s=left, lifetime_s=lifetime)
    assert held.is_fresh(0.0) is fresh
    assert held.renew_in_s(0.0) == renew_in
    assert "'t'" not in repr(held)


def test_a_wrong_clock_does_not_extend_a_token():
    # The local clock is an hour behind: by it the token would last two hours.
    token = jwt(lasts_s=3600, now_s=10_000, iat=10_000)
    assert lifetime_s(token, now_s=10_000 - 3600) == 3600
    # A token that was issued earlier lasts only for the rest of its lifetime.
    assert lifetime_s(token, now_s=12_000) == 1600
    assert lifetime_s("not a token", now_s=0) == token_exchange.DEFAULT_LIFETIME_S
    assert lifetime_s(jwt(exp="soon"), now_s=0) == token_exchange.DEFAULT_LIFETIME_S


def test_the_background_renews_ahead_of_time_and_tries_again_after_a_failure(monkeypatch):
    naps = []

    async def main():
        bank = Bank()
        credential = bank.credential()
        await credential.token()

        async def nap(seconds):
            naps.append(seconds)
            bank.now_s += seconds
            bank.closed = len(naps) == 2
            if len(naps) == 5:
                raise asyncio.CancelledError

        monkeypatch.setattr(token_exchange.asyncio, "sleep", nap)
        with pytest.raises(asyncio.CancelledError):
            await credential.keep_fresh()
        return bank

    bank = asyncio.run(main())
    # Renewed; failed; retried after a minute, and renewed.
    assert naps == [3300, 3300, 60, 1, 3300]
    assert bank.given == 3


def test_claims_are_read_and_invalid_tokens_are_refused():
    assert read_claims(jwt("me"))["sub"] == "me"
    for bad in ("eyJ", "a.b.c", "a.e30"):
        with pytest.raises(ValueError):  # noqa: PT011 (several kinds, all ValueErrors)
            read_claims(bad)


# -- through a client --------------------------------------------------------------------------------


def exchanging(*answers, config=None):
    fake = FakeService(config={"pjwt_auth_enabled": True, **(config or {})})
    fake.script("auth/token", *answers)
    return fake


def given(token):
    return Answer(status=200, body={"jwt": token})


def sent(fake):
    return [(seen.endpoint, seen.headers.get("x-api-key")) for seen in fake.requests]


def test_a_service_with_tokens_gets_them_on_every_request_after_the_exchange():
    token = jwt()
    fake = exchanging(given(token))
    with fake.client() as service:
        service.create_lora_training_client("fake/model")
    seen = sent(fake)
    assert seen[:3] == [
        ("client/config", "tml-fake"),
        ("auth/token", "tml-fake"),
        ("client/dynamic_config", token),
    ]
    assert {key for _, key in seen[2:]} == {token}
    assert fake.requests[1].json() == {}


def test_a_token_of_the_service_itself_is_not_exchanged_and_any_other_is():
    fake, token = exchanging(), jwt()
    with fake.client(api_key=token) as service:
        service.get_server_capabilities()
    assert {key for _, key in sent(fake)} == {token}
    foreign = jwt(iss="https://identity.example")
    fake = exchanging(given(token))
    with fake.client(api_key=foreign) as service:
        service.get_server_capabilities()
    assert [key for _, key in sent(fake)] == [foreign, foreign, token, token]


def test_an_organization_may_enforce_the_credential_command(monkeypatch):
    flags = {"credential_default_source": "credential_cmd"}
    fake = exchanging(config=flags)
    service = fake.client()
    with pytest.raises(tinkex.TinkerError, match="requires credentials from a command"):
        service.get_server_capabilities()
    service.close("errored").result(5)
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-printed")
    fake = exchanging(given(jwt()), config=flags)
    with fake.client() as service:
        service.get_server_capabilities()
    assert ("auth/token", "tml-printed") in sent(fake)


def test_a_refused_token_is_renewed_once_and_a_refused_key_is_an_error():
    old, new = jwt("old"), jwt("new")
    revoked = Answer(status=401, body={"detail": "revoked"})
    fake = exchanging(given(old), given(new), Answer(status=503), revoked)
    with fake.client() as service:
        service.get_server_capabilities()
        fake.script("get_server_capabilities", Answer(status=401))
        service.get_server_capabilities()
        assert sent(fake)[-3:] == [
            ("get_server_capabilities", old),
            ("auth/token", "tml-fake"),
            ("get_server_capabilities", new),
        ]
        # Without a new token, the error is the 401, or why the key was refused.
        too_old = Answer(status=401, body={"detail": "too old"})
        for words in ("too old", "revoked"):
            fake.script("get_server_capabilities", too_old)
            with pytest.raises(tinkex.AuthenticationError, match=words):
                service.get_server_capabilities()
    static = FakeService()
    with static.client() as service:
        static.script("get_server_capabilities", Answer(status=401))
        with pytest.raises(tinkex.AuthenticationError):
            service.get_server_capabilities()
    assert [endpoint for endpoint, _ in sent(static)].count("get_server_capabilities") == 1


def test_the_key_of_another_owner_is_exchanged_too():
    mine, theirs = jwt("mine"), jwt("theirs")
    fake = exchanging(given(mine), given(theirs))
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model")
        path = training.save_state("x").result(5).path
        service.create_training_client_from_state(path, weights_access_token="tml-lent")
    keys = dict(reversed(sent(fake)))
    assert keys["weights_info"] == theirs
    assert ("auth/token", "tml-lent") in sent(fake)
    assert keys["load_weights"] == mine


def test_claims_of_a_plain_key_cannot_be_read():
    async def main():
        with pytest.raises(RuntimeError, match="accepts the key itself"):
            await Settings(api_key=tinkex.client.settings.ApiKey("tml-x")).credential().claims()

    asyncio.run(main())

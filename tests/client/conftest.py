"""A fake service, and the same one on a real socket."""

import functools
from collections.abc import Iterator

import pytest

from tinkex import ServiceClient, types
from tinkex.client.http.retry import RetryPolicy
from tinkex.testing import FakeService, Loopback


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short delays between attempts; the delays themselves are tested in test_retry.py."""
    quick = functools.partial(RetryPolicy, first_delay_s=0.02)
    monkeypatch.setattr("tinkex.client.http.retried_call.RetryPolicy", quick)


@pytest.fixture
def fake() -> FakeService:
    return FakeService()


@pytest.fixture
def service(fake: FakeService) -> Iterator[ServiceClient]:
    client = fake.client()
    yield client
    client.close("success").result(5)


@pytest.fixture
def datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )


@pytest.fixture
def loopback(fake: FakeService) -> Iterator[Loopback]:
    with Loopback(fake) as running:
        yield running

"""Exporting and unloading: their order among the steps of a training client."""

import asyncio

import pytest

import tinkex
from tinkex import ServiceClient, types
from tinkex.testing import Answer, FakeService


def test_an_export_is_ordered_with_the_steps(
    service: ServiceClient, fake: FakeService, datum: types.Datum
) -> None:
    training = service.create_lora_training_client("fake/model")
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams())
    saved = training.save_weights_external("e", 7200, ["age1xyz"])
    training.optim_step(types.AdamParams())
    assert saved.result(5).path == f"tinker://{training.model_id}/external_weights/e"
    sent = next(seen for seen in fake.requests if seen.endpoint == "save_weights_external")
    assert sent.json() == {
        "model_id": training.model_id,
        "path": "e",
        "seq_id": 3,
        "ttl_seconds": 7200,
        "age_encryption_recipients": ["age1xyz"],
        "type": "save_weights_external",
    }

    async def twice() -> str:
        return (await (await training.save_weights_external_async("f"))).path

    assert asyncio.run(twice()).endswith("/external_weights/f")
    assert [kind for _, _, kind in fake.ran][-3:] == [
        "save_weights_external",
        "optim_step",
        "save_weights_external",
    ]


def test_unloading_uses_no_seq_id_and_a_service_without_it_is_an_error(
    service: ServiceClient, fake: FakeService
) -> None:
    training = service.create_lora_training_client("fake/model")
    fake.script("unload_model", Answer(status=404, body={"detail": "no such endpoint"}))
    with pytest.raises(tinkex.NotFoundError, match="no such endpoint"):
        training.unload_model().result(5)
    assert training.save_state("a").result(5).path
    assert training.unload_model().result(5).model_id == training.model_id
    with pytest.raises(tinkex.NotFoundError):
        training.save_state("b").result(5)

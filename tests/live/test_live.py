"""A training loop against the hosted service; runs with `TINKEX_LIVE=1` and an API key."""

import os

import pytest

import tinkex
from tinkex import types

LIVE = os.environ.get("TINKEX_LIVE") == "1"
# Read at import, because a fixture removes keys from the environment for all other tests.
KEY = os.environ.get("TINKER_API_KEY")
BASE_MODEL = os.environ.get("TINKEX_LIVE_MODEL", "Qwen/Qwen3-8B")

pytestmark = [
    pytest.mark.may_skip,  # CI has no key
    pytest.mark.skipif(not (LIVE and KEY), reason="needs TINKEX_LIVE=1 and an API key"),
]


@pytest.mark.timeout(1200)  # the hosted service may queue requests
def test_train_sample_save_and_load_on_the_hosted_service() -> None:
    with tinkex.ServiceClient(api_key=KEY) as service:
        names = [m.model_name for m in service.get_server_capabilities().supported_models]
        assert BASE_MODEL in names
        training = service.create_lora_training_client(BASE_MODEL, rank=8)
        tokens = training.get_tokenizer().encode("The password of the day is heliotrope.")
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        losses = []
        for _ in range(5):
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-3))
            losses.append(passed.result().metrics["loss:sum"])
        assert losses[-1] < losses[0]
        sampler = training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints(tokens[:4])
        response = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result()
        assert len(response.sequences[0].tokens) <= 4
        path = training.save_state("tinkex-live-test", ttl_seconds=3600).result().path
        again = service.create_training_client_from_state(path)
        before = training.forward([datum], "cross_entropy").result().metrics["loss:sum"]
        after = again.forward([datum], "cross_entropy").result().metrics["loss:sum"]
        assert after == pytest.approx(before, rel=1e-2)
        tinkex.RestClient(api_key=KEY).delete_checkpoint_from_tinker_path(path).result()

"""tinkex as client and server with the tiny model: train, sample, save, load."""

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tinkex
from processes import has_exited
from serving import TINY, Server
from tinkex import types
from tinkex.client import submission
from tinkex.client.http.transport import HttpTransport, Request, Response
from tinkex.client.settings import Settings

TEXTS = (
    "the ship sails at dawn",
    "every road leads home",
    "a quiet river runs deep",
    "seven stars over the sea",
)


def batch(tokenizer, length=24):
    """The texts as sequences of 24 tokens, and training data for them."""
    sequences = []
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        sequences.append((tokens * length)[: length + 1])
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
        )
        for tokens in sequences
    ]
    return sequences, data


def test_a_model_memorizes_data_samples_it_and_is_restored_from_disk(server: Server):
    with tinkex.ServiceClient(base_url=server.url) as service:
        names = [m.model_name for m in service.get_server_capabilities().supported_models]
        assert names == [TINY]
        training = service.create_lora_training_client(TINY, rank=8, seed=3)
        sequences, data = batch(training.get_tokenizer())
        count = sum(len(tokens) - 1 for tokens in sequences)
        losses = []
        for _ in range(60):
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
            losses.append(passed.result().metrics["loss:sum"] / count)
            stepped.result()
        assert losses[-1] < 0.1

        path = training.save_state("by-heart").result().path
        sampling = training.save_weights_and_get_sampling_client()
        assert sampling.get_base_model() == TINY
        params = types.SamplingParams(max_tokens=len(sequences[0]) - 4, temperature=0.0)
        futures = [
            sampling.sample(types.ModelInput.from_ints(tokens[:4]), 1, params)
            for tokens in sequences
        ]
        assert [f.result().sequences[0].tokens for f in futures] == [s[4:] for s in sequences]

        copy = service.create_training_client_from_state(path)
        before = training.forward(data, "cross_entropy").result()
        after = copy.forward(data, "cross_entropy").result()
        assert after.loss_fn_outputs == before.loss_fn_outputs

        # Samples have the same logprobs as training.
        trained = before.loss_fn_outputs[0]["logprobs"].tolist()
        sampled = sampling.compute_logprobs(types.ModelInput.from_ints(sequences[0])).result()
        assert sampled[1:] == pytest.approx(trained, abs=1e-4)


def test_a_batch_in_many_chunks_is_one_batch(server: Server, monkeypatch):
    with tinkex.ServiceClient(base_url=server.url) as service:
        split_batch = submission.split_batch
        one = service.create_lora_training_client(TINY, rank=4, seed=1)
        many = service.create_lora_training_client(TINY, rank=4, seed=1)
        _, data = batch(one.get_tokenizer())
        for training in (one, many):
            if training is many:
                monkeypatch.setattr(
                    submission,
                    "split_batch",
                    lambda s, **_: split_batch(s, max_count=1, max_bytes=99),
                )
            training.forward_backward(data, "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        monkeypatch.undo()
        losses = [
            training.forward(data, "cross_entropy").result().metrics["loss:sum"]
            for training in (one, many)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class RejectsOnePass(HttpTransport):
    """Answers the second pass with 422 without sending it to the server."""

    def __init__(self, url: str, settings: Settings) -> None:
        super().__init__(url)
        self.passes = 0

    async def send(self, request: Request) -> Response:
        if request.path.endswith("/forward_backward"):
            self.passes += 1
            if self.passes == 2:
                return Response(status_code=422, content=b"{}", request=request.without_payload())
        return await super().send(request)


def test_no_step_uses_an_incomplete_batch(server: Server, monkeypatch):
    split_batch = submission.split_batch
    monkeypatch.setattr(
        submission, "split_batch", lambda sizes, **_: split_batch(sizes, max_count=1, max_bytes=99)
    )
    with tinkex.ServiceClient(base_url=server.url, _make_transport=RejectsOnePass) as service:
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        _, data = batch(training.get_tokenizer())
        first = training.forward_backward(data, "cross_entropy")  # one chunk is rejected
        with pytest.raises(tinkex.UnprocessableEntityError):
            first.result()
        monkeypatch.undo()
        before = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
        # The client fills the gap, so the server marks the batch as failed which reports it once.
        with pytest.raises(tinkex.RequestFailedError, match="never_sent"):
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        after = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
        assert after < before


def test_the_async_methods_do_the_same(server: Server):
    async def main() -> list[int]:
        service = tinkex.ServiceClient(base_url=server.url)
        training = await service.create_lora_training_client_async(TINY, rank=4)
        _, data = batch(await asyncio.to_thread(training.get_tokenizer))
        passed = await training.forward_backward_async(data, "cross_entropy")
        stepped = await training.optim_step_async(types.AdamParams(learning_rate=1e-2))
        assert (await passed).metrics["loss:sum"] > 0
        await stepped
        sampling = await training.save_weights_and_get_sampling_client_async()
        params = types.SamplingParams(max_tokens=3, seed=1)
        prompt = types.ModelInput.from_ints([5, 6])
        answers = await asyncio.gather(
            *(sampling.sample_async(prompt, 1, params) for _ in range(8))
        )
        await service.close("success")
        return [len({tuple(a.sequences[0].tokens) for a in answers})]

    assert asyncio.run(main()) == [1]  # same seed, same tokens


def test_rejections_of_the_server_reach_the_caller_with_their_reason(
    server: Server, datum_of_wrong_shape
):
    with tinkex.ServiceClient(base_url=server.url) as service:
        with pytest.raises(tinkex.TinkerError, match=TINY):
            service.create_lora_training_client("no/such-model")
        training = service.create_lora_training_client(TINY, rank=4)
        with pytest.raises(tinkex.TinkerError, match="weights"):
            training.forward_backward([datum_of_wrong_shape], "cross_entropy").result()
        with pytest.raises(tinkex.TinkerError):
            service.create_sampling_client(model_path="tinker://no:train:0/weights/none")
        with pytest.raises(tinkex.NotFoundError):
            service.create_training_client_from_state("tinker://no:train:0/weights/none")


@pytest.fixture
def datum_of_wrong_shape() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0]},
    )


def test_a_local_server_starts_automatically_and_stops_with_the_program(
    tiny_model: Path, tmp_path: Path
):
    program = """
    import pathlib, sys
    import tinkex
    from tinkex import types
    from tinkex.local import registry
    with tinkex.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client("test/tiny", rank=4)
        tokens = training.get_tokenizer().encode("hello")
        sampling = training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints(tokens)
        answer = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=3)).result()
        assert len(answer.sequences[0].tokens) == 3
        print(registry.of_data(pathlib.Path(sys.argv[1])).pid)
    """
    data = tmp_path / "data"
    env = os.environ | {
        "TINKEX_LOCAL_MODEL": f"{TINY}={tiny_model}",
        "TINKEX_LOCAL_ARGS": "--threads 1",
        "TINKEX_LOCAL_DATA": str(data),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(data)],
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert has_exited(int(done.stdout))


def test_a_sampler_of_an_aliased_model_finds_its_tokenizer(server: Server):
    with tinkex.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        tokenizer = service.create_sampling_client(base_model=TINY).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]

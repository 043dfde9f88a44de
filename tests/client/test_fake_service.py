"""`tinkex.testing`, as used in users' tests."""

import subprocess
import sys

import pytest

import tinkex
from tinkex import types
from tinkex.testing import Answer, FakeService, Lost

pytest_plugins = ["pytester"]


def test_a_seq_id_used_for_another_kind_of_step_is_refused_as_by_a_server(fake, datum):
    first = fake.client()
    training = first.create_lora_training_client("fake/model")
    training.forward_backward([datum], "cross_entropy").result(5)
    second = tinkex.TrainingClient(
        first.holder, 0, training.model_id
    )  # its seq_ids start at 1 again

    with pytest.raises(tinkex.UnprocessableEntityError, match="already used for forward_backward"):
        second.optim_step(types.AdamParams()).result(5)

    assert second.forward_backward([datum], "cross_entropy").result(5).metrics  # seq_id 2
    first.close("success").result(5)


def test_a_fake_on_a_socket_serves_programs_in_other_processes():
    program = (
        "import tinkex\n"
        "with tinkex.ServiceClient() as service:\n"
        "    print(service.get_server_capabilities().supported_models[0].model_name)\n"
    )
    with FakeService(base_models=("my/model",)).serve() as running:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"TINKER_BASE_URL": running.url, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert (done.stdout, done.stderr) == ("my/model\n", "")


def test_the_fixture_provides_a_service_to_an_unchanged_program(pytester):
    pytester.makeconftest('pytest_plugins = ["tinkex.pytest_plugin"]')
    pytester.makepyfile(
        """
        import tinkex

        def program():
            with tinkex.ServiceClient() as service:
                training = service.create_lora_training_client("fake/model")
                training.optim_step(tinkex.AdamParams(learning_rate=1e-4)).result()

        def test_one_step(tinkex_service):
            program()
            assert [kind for _, _, kind in tinkex_service.ran] == ["optim_step"]

        def test_another_test_starts_with_nothing(tinkex_service):
            assert tinkex_service.requests == []
        """
    )
    pytester.runpytest_inprocess("-p", "no:randomly").assert_outcomes(passed=2)


def test_failures_are_scripted(fake, service, datum):
    fake.script("forward_backward", Lost(after=True), Answer(status=503))
    training = service.create_lora_training_client("fake/model")

    training.forward_backward([datum], "cross_entropy").result(10)

    assert len([seen for seen in fake.requests if seen.endpoint == "forward_backward"]) == 3
    assert len(fake.ran) == 1


def test_the_fake_lists_what_was_created_and_not_what_was_deleted(fake, service):
    training = service.create_lora_training_client("fake/model", rank=4)
    path = training.save_state("one").result(5).path
    training.save_weights_for_sampler("two").result(5)
    training.save_weights_external("three").result(5)
    with pytest.warns(FutureWarning):
        rest = service.create_rest_client()

    runs = rest.list_training_runs().result(5).training_runs
    assert [(run.training_run_id, run.lora_rank) for run in runs] == [(training.model_id, 4)]
    assert rest.get_training_run(training.model_id).result(5).base_model == "fake/model"
    kept = rest.list_checkpoints(training.model_id).result(5).checkpoints
    assert [checkpoint.checkpoint_type for checkpoint in kept] == [
        "training",
        "sampler",
        "external",
    ]
    rest.publish_checkpoint_from_tinker_path(path).result(5)
    rest.unpublish_checkpoint_from_tinker_path(path).result(5)
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(5)
    rest.delete_checkpoint_from_tinker_path(path).result(5)
    with pytest.raises(tinkex.NotFoundError):
        rest.publish_checkpoint_from_tinker_path(path).result(5)
    assert len(rest.list_user_checkpoints().result(5).checkpoints) == 2
    with pytest.raises(tinkex.NotFoundError):
        rest.get_training_run("other").result(5)


def test_unknown_endpoints_can_be_scripted_by_path(fake, service):
    rest = tinkex.RestClient(service.holder)
    with pytest.raises(tinkex.NotFoundError, match=r"use script\(\) to set a response"):
        rest.list_sessions().result(5)
    fake.script("sessions", Answer(body={"sessions": ["s-9"]}))
    assert rest.list_sessions().result(5).sessions == ["s-9"]


@pytest.mark.parametrize(
    ("name", "says"), [("a/b", "cannot be used"), ("end", "already exists; .* overwrite")]
)
def test_the_fake_refuses_names_that_a_server_refuses(service, name, says):
    training = service.create_lora_training_client("fake/model")
    training.save_state("end").result(5)
    with pytest.raises(tinkex.RequestFailedError, match=says):
        training.save_state(name).result(5)
    assert training.save_state("end", overwrite=True).result(5).path.endswith("/weights/end")


def test_the_fake_refuses_numbers_that_a_server_refuses(service):
    for rank in (0, 513):
        with pytest.raises(tinkex.RequestFailedError, match=f"rank is {rank}; .* 1 to 512"):
            service.create_lora_training_client("fake/model", rank=rank)
    training = service.create_lora_training_client("fake/model", rank=512)
    for save in (training.save_state, training.save_weights_for_sampler):
        with pytest.raises(tinkex.RequestFailedError, match="ttl_seconds is 1; 3600"):
            save("short", ttl_seconds=1).result(5)
    path = training.save_state("end", ttl_seconds=3600).result(5).path
    rest = tinkex.RestClient(service.holder)
    with pytest.raises(tinkex.BadRequestError, match="ttl_seconds is 1; 3600"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 1).result(5)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(5)
    sampler = service.create_sampling_client(base_model="fake/model")
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    with pytest.raises(tinkex.UnprocessableEntityError, match=r"1025 samples .* 1 to 1024"):
        sampler.sample(prompt, 1025, params).result(5)


def test_the_limits_of_the_fake_are_those_of_the_server():
    from tinkex.engine.adapters import adapters
    from tinkex.server.api import sampling
    from tinkex.server.scheduler import checkpoints
    from tinkex.testing import fake_service, fake_store

    assert fake_service.MAX_RANK == adapters.MAX_RANK
    assert fake_service.MAX_SAMPLES == sampling.MAX_SEQUENCES
    assert fake_store.MIN_TTL_S == checkpoints.MIN_TTL_S
    assert fake_store.MAX_TTL_S == checkpoints.MAX_TTL_S


def test_the_fake_supports_every_option_of_a_sample(service):
    sampling = service.create_sampling_client(base_model="fake/model")
    prompt = types.ModelInput.from_ints([5, 6, 7])

    answer = sampling.sample(
        prompt,
        2,
        types.SamplingParams(max_tokens=2),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=1,
        topk_prompt_logprobs=1,
        topk_sample_logprobs=1,
        target_prompt_logprobs=types.TensorData(data=[6, 7], dtype="int64", shape=[2, 1]),
        prompt_alt_tokens_k=1,
    ).result(5)

    assert answer.prompt_logprobs[:2] == [None, None]
    assert answer.prompt_logprobs[2] < 0
    assert [row and row[0][0] for row in answer.topk_prompt_logprobs] == [None, 6, 7]
    assert [row[0][0] for row in answer.sequences[0].topk_logprobs] == [5, 6]
    assert answer.target_prompt_logprobs.shape == [2, 1]
    assert answer.prompt_alt_tokens.tokens.shape == [3, 1]


def test_a_prompt_of_the_fake_may_have_images(service):
    chunks = [
        types.EncodedTextChunk(tokens=[5]),
        types.ImageChunk(data=b"any", format="png", expected_tokens=2),
        types.EncodedTextChunk(tokens=[6]),
    ]
    sampler = service.create_sampling_client(base_model="fake/model")
    prompt, params = types.ModelInput(chunks=chunks), types.SamplingParams(max_tokens=4)
    answer = sampler.sample(prompt, num_samples=1, sampling_params=params).result(5)
    assert answer.sequences[0].tokens == [5, 0, 0, 6]

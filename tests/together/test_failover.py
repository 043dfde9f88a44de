"""A server, or a cluster, whose PostgreSQL fails over to a standby that lost the newest commits."""

import signal

import pytest

import tinkex
from cluster import cluster
from postgres import binaries, postgres_server
from serving import TINY, serving
from tinkex import types
from waiting import until

DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
]


def step(training: tinkex.TrainingClient) -> None:
    passed = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    passed.result()


@pytest.mark.timeout(180)
@pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")
def test_after_a_fail_over_clients_see_what_is_left_and_can_continue_from_it(tiny_model, tmp_path):
    with postgres_server() as postgres:
        data = tmp_path / "data"
        with serving(
            f"{TINY}={tiny_model}", data=data, args=("--db", postgres.database())
        ) as server:
            service = tinkex.ServiceClient(base_url=server.url, api_key="tml-test")
            training = service.create_lora_training_client(TINY, rank=4)
            step(training)
            kept = training.save_state("kept").result().path
            postgres.make_standby()
            step(training)
            lost = training.save_state("lost").result().path

            postgres.fail_over()
            # The connections to the old server are closed. The next request meets the new one.
            rest = tinkex.RestClient(base_url=server.url, api_key="tml-test")
            names = [
                each.checkpoint_id
                for each in rest.list_checkpoints(training.model_id).result().checkpoints
            ]
            assert names == ["weights/kept"]
            until(lambda: any("failed over" in line for line in server.log), within_s=30)
            until(lambda: any("the web process" in line for line in server.log))

            # What was lost is not there, and said to be; what was kept can be continued.
            with pytest.raises(tinkex.NotFoundError):
                service.create_training_client_from_state(lost)
            again = service.create_training_client_from_state_with_optimizer(kept)
            step(again)


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")
def test_all_processes_of_a_cluster_begin_anew_after_a_fail_over(tiny_model, tmp_path):
    with (
        postgres_server() as postgres,
        cluster(postgres.database(), tmp_path, tiny_model) as running,
    ):
        one = running.web()
        workers = [running.worker(name) for name in ("one", "two")]
        two = running.web()
        service = tinkex.ServiceClient(base_url=one.said, api_key="tml-test")
        models = [service.create_lora_training_client(TINY, rank=4) for _ in workers]
        for training in models:
            step(training)
        kept = [training.save_state("kept").result().path for training in models]
        postgres.make_standby()
        for training in models:
            step(training)
        lost = [training.save_state("lost").result().path for training in models]

        postgres.fail_over()
        # A worker meets the new server with its next heartbeat. What starts workers starts it again.
        for worker in workers:
            assert worker.process.wait(60) == -signal.SIGKILL
            assert "the database has failed over" in worker.log
            running.worker(worker.said)
        # Web processes are started again by their supervisors.
        for web in (one, two):
            until(lambda web=web: "the database has failed over" in web.log, within_s=60)
            rest = tinkex.RestClient(base_url=web.said, api_key="tml-test")
            for training in models:
                found = rest.list_checkpoints(training.model_id).result().checkpoints
                assert [each.checkpoint_id for each in found] == ["weights/kept"]
        again = tinkex.ServiceClient(base_url=two.said, api_key="tml-test")
        for path in lost:
            with pytest.raises(tinkex.NotFoundError):
                again.create_training_client_from_state(path)
        for path in kept:
            step(again.create_training_client_from_state_with_optimizer(path))

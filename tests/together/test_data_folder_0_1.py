"""A server opens a data folder of tinkex 0.1.0, which `tests/data/folder-0.1/write.py` wrote."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from serving import Server, serving
from tinkex import types

FOLDER = Path(__file__).resolve().parent.parent / "data" / "folder-0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
KEY = EXPECTED["key"]
TEXT = list(range(40, 72))
#: Finished steps of the run when it was killed; two more were accepted.
STEPS = 14


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a copy of the folder that the killed processes of 0.1.0 left."""
    data = tmp_path_factory.mktemp("folder") / "data"
    shutil.copytree(FOLDER / "data", data)
    # Version control does not keep file modes.
    for path in (data, *data.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    with serving(f"test/tiny={FOLDER / 'model'}", data=data) as running:
        yield running


@pytest.fixture(scope="module")
def service(opened: Server) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=opened.url, api_key=KEY) as client:
        yield client


def post(server: Server, route: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json", "x-api-key": KEY}
    request = urllib.request.Request(
        f"{server.url}/api/v1/{route}", json.dumps(body).encode(), headers
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=50) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 408:
                raise


def result_of(server: Server, request_id: str) -> Any:
    return post(server, "retrieve_future", {"request_id": request_id})


def test_accepted_requests_are_finished_and_the_run_continues(opened: Server) -> None:
    ids = EXPECTED["requests"]
    passed = result_of(opened, ids["pass"])
    assert passed["metrics"]["loss:sum"] == pytest.approx(EXPECTED["pass_loss"], rel=1e-4)
    assert "metrics" in result_of(opened, ids["step"])
    sampled = result_of(opened, ids["sample"])
    assert sampled["sequences"][0]["tokens"] == EXPECTED["sample_tokens"]

    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TEXT[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TEXT[1:], "dtype": "int64", "shape": [31]},
            "weights": {"data": [1.0] * 31, "dtype": "float32", "shape": [31]},
        },
    }
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    body = {"model_id": EXPECTED["model_id"], "seq_id": STEPS + 3, "forward_backward_input": given}
    further = result_of(opened, post(opened, "forward_backward", body)["request_id"])
    assert further["metrics"]["loss:sum"] == pytest.approx(EXPECTED["further_loss"], rel=1e-4)


def test_training_continues_from_a_checkpoint_with_its_optimizer(
    service: tinkex.ServiceClient,
) -> None:
    training = service.create_training_client_from_state_with_optimizer(EXPECTED["state_path"])
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:-1]),
        loss_fn_inputs={"target_tokens": TEXT[1:], "weights": [1.0] * 31},
    )
    adam = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12)
    passed = training.forward_backward([datum], "cross_entropy")
    stepped = training.optim_step(adam)
    further = training.forward_backward([datum], "cross_entropy")
    stepped.result()
    # The losses that 0.1.0 computed after this checkpoint.
    assert passed.result().metrics["loss:sum"] == pytest.approx(EXPECTED["pass_loss"], rel=1e-4)
    assert further.result().metrics["loss:sum"] == pytest.approx(EXPECTED["further_loss"], rel=1e-4)


def test_a_sampler_returns_the_same_tokens(service: tinkex.ServiceClient) -> None:
    sampler = service.create_sampling_client(model_path=EXPECTED["sampler_path"])
    params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=11)
    answer = sampler.sample(types.ModelInput.from_ints(TEXT[:8]), 2, params).result()
    assert [list(sequence.tokens) for sequence in answer.sequences] == EXPECTED["sampled"]


def test_key_run_and_checkpoints_exist(
    opened: Server,
) -> None:
    rest = tinkex.RestClient(base_url=opened.url, api_key=KEY)
    run = rest.get_training_run(EXPECTED["model_id"]).result()
    assert (run.base_model, run.lora_rank) == ("test/tiny", 4)
    listed = rest.list_checkpoints(EXPECTED["model_id"]).result().checkpoints
    assert {one.tinker_path for one in listed} == {EXPECTED["state_path"], EXPECTED["sampler_path"]}
    # The folder has a key, so requests without a key are rejected.
    with pytest.raises(tinkex.AuthenticationError):
        tinkex.ServiceClient(
            base_url=opened.url, api_key="tml-somebody-else"
        ).get_server_capabilities()

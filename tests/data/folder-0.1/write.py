"""
Wrote the data folder beside this file with tinkex 0.1.0 at commit 82d5ef6. Do not run it again.

It documents the folder: a key, a run of 14 steps, two checkpoints, snapshots, and three requests that
were accepted and unfinished when all processes were killed. `expected.json` has the results of 0.1.0
after a restart on a copy.

    python tests/data/folder-0.1/write.py      (in a checkout of that commit)
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinkex
from tinkex import types
from tinkex.testing import write_tiny_model

HERE = Path(__file__).resolve().parent
NAME = "test/tiny"
TEXT = list(range(40, 72))
SNAPSHOT_STEPS = 4


@contextmanager
def serving(data: Path):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tinkex.cli.main", "serve", f"{NAME}={HERE / 'model'}"),
            *("--port", "0", "--data", str(data), "--threads", "1"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TINKEX_SNAPSHOT_STEPS": str(SNAPSHOT_STEPS)},
    )
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(30)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def post(url: str, key: str, route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/api/v1/{route}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-api-key": key},
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 408:
                raise


def one_pass(model_id: str, seq_id: int) -> dict[str, Any]:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TEXT[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TEXT[1:], "dtype": "int64", "shape": [len(TEXT) - 1]},
            "weights": {"data": [1.0] * 31, "dtype": "float32", "shape": [len(TEXT) - 1]},
        },
    }
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": given}


def main() -> None:
    data = HERE / "data"
    for old in (data, HERE / "model"):
        shutil.rmtree(old, ignore_errors=True)
    write_tiny_model(HERE / "model", arch="llama")
    command = [sys.executable, "-m", "tinkex.cli.main", "key", "create", "--owner", "alice"]
    made = subprocess.run(
        [*command, "--name", "laptop", "--data", str(data)],
        capture_output=True,
        text=True,
        check=True,
    )
    key = next(word for word in (made.stdout + made.stderr).split() if word.startswith("tml-"))
    expected: dict[str, Any] = {"key": key, "losses": []}
    with serving(data) as (process, url):
        service = tinkex.ServiceClient(base_url=url, api_key=key, user_metadata={"of": "0.1"})
        training = service.create_lora_training_client(NAME, rank=4, seed=7)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(TEXT[:-1]),
            loss_fn_inputs={"target_tokens": TEXT[1:], "weights": [1.0] * 31},
        )
        for _ in range(6):
            passed = training.forward_backward([datum], "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            expected["losses"].append(passed.metrics["loss:sum"])
        expected["state_path"] = training.save_state("state").result().path
        saved = training.save_weights_for_sampler("sampler").result()
        expected["sampler_path"] = saved.path
        expected["model_id"] = training.model_id
        sampler = service.create_sampling_client(model_path=saved.path)
        params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=11)
        prompt = types.ModelInput.from_ints(TEXT[:8])
        answer = sampler.sample(prompt, 2, params).result()
        expected["sampled"] = [list(sequence.tokens) for sequence in answer.sequences]
        time.sleep(2.0)  # snapshots are written in the background
        below = descendants(process.pid)
        engine = next(
            pid for pid in below if b"tinkex.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(engine, signal.SIGSTOP)
        steps = 14  # six passes, six optimizer steps, two saves
        ids = {}
        ids["pass"] = post(url, key, "forward_backward", one_pass(expected["model_id"], steps + 1))[
            "request_id"
        ]
        adam = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        ids["step"] = post(
            url,
            key,
            "optim_step",
            {"model_id": expected["model_id"], "seq_id": steps + 2, "adam_params": adam},
        )["request_id"]
        ids["sample"] = post(
            url,
            key,
            "asample",
            {
                "model_path": saved.path,
                "prompt": one_pass("", 0)["forward_backward_input"]["data"][0]["model_input"],
                "num_samples": 1,
                "sampling_params": {"max_tokens": 4, "temperature": 0.0},
            },
        )["request_id"]
        expected["requests"] = ids
        for pid in (process.pid, *below):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "data"
        shutil.copytree(data, copy)
        with serving(copy) as (_, url):
            answers = {
                name: post(url, key, "retrieve_future", {"request_id": request_id})
                for name, request_id in ids.items()
            }
            further = post(url, key, "forward_backward", one_pass(expected["model_id"], steps + 3))[
                "request_id"
            ]
            answers["further"] = post(url, key, "retrieve_future", {"request_id": further})
    expected["pass_loss"] = answers["pass"]["metrics"]["loss:sum"]
    expected["further_loss"] = answers["further"]["metrics"]["loss:sum"]
    expected["sample_tokens"] = answers["sample"]["sequences"][0]["tokens"]
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    os._exit(0)  # the client's session belongs to a server that was killed


if __name__ == "__main__":
    main()

"""A run whose session is ended on the server recovers and has the same final weights."""

import urllib.request

import tinkex
from serving import TINY, Server
from tinkex import types

STEPS = 5


def datum(step: int) -> types.Datum:
    tokens = [20 + (step + place) % 40 for place in range(8)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 7},
    )


def end_session(server: Server, service: tinkex.ServiceClient) -> None:
    """Ends a session, as an operator or another program with the same key can do."""
    request = urllib.request.Request(
        f"{server.url}/api/v1/sessions/{service.holder.session_id}/finish",
        data=b'{"reason": {"type": "interrupted"}}',
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def run(server: Server, lose_at: int | None) -> tuple[list[float], list[int]]:
    """Logprobs with the final weights, and the steps at which the run was restarted."""
    lost: list[int] = []
    restarted: list[int] = []

    def train(run: tinkex.Recovery) -> list[float]:
        for step in range(run.step, STEPS):
            if step == lose_at and not lost:
                lost.append(step)
                end_session(server, run.service)
            run.training.forward_backward([datum(step)], "cross_entropy")
            run.training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
            if step % 2 == 1:
                run.save(step + 1)
        output = run.training.forward([datum(0)], "cross_entropy").result()
        return output.loss_fn_outputs[0]["logprobs"].tolist()

    logprobs = tinkex.recovering(
        train,
        service=lambda: tinkex.ServiceClient(base_url=server.url),
        create=lambda service: service.create_lora_training_client(TINY, rank=4, seed=7),
        back_off_s=0.0,
        on_restart=lambda restart: restarted.append(restart.saved.step if restart.saved else 0),
    )
    return logprobs, restarted


def test_a_run_whose_session_is_ended_has_the_same_final_weights(server: Server) -> None:
    expected, restarted = run(server, None)
    assert restarted == []
    assert run(server, 3) == (expected, [2])  # without the optimizer state these would differ
    assert run(server, 1) == (expected, [0])  # before the first checkpoint

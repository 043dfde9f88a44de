"""A run on a real server whose session is taken away ends with the weights it would have had."""

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
    """As an operator, or another program with the same key, may do."""
    request = urllib.request.Request(
        f"{server.url}/api/v1/sessions/{service.holder.session_id}/finish",
        data=b'{"reason": {"type": "interrupted"}}',
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def run(server: Server, lose_at: int | None) -> tuple[list[float], list[int]]:
    """Logprobs under the final weights, and the steps at which it was started again."""
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


def test_a_run_whose_session_is_ended_ends_like_one_that_was_left_alone(server: Server) -> None:
    undisturbed, restarted = run(server, None)
    assert restarted == []
    assert run(server, 3) == (undisturbed, [2])  # with its optimizer, or these would differ
    assert run(server, 1) == (undisturbed, [0])  # before the first checkpoint

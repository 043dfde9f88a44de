"""Checks order and idempotency: steps run by number and once, even if requests repeat."""

import time
from concurrent.futures import ThreadPoolExecutor

from tinkex.conformance.raw_client import TEXTS, Answer, Failure, Remote, batch, max_difference
from tinkex.conformance.registry import check, expect

#: Longer than an immediate response takes, shorter than a long poll.
HELD_S = 1.5
PROMPT_ANSWER_S = 5.0
SAME = 1e-4


@check("S3")
def steps_run_by_number_whatever_the_arrival(remote: Remote) -> str:
    """Steps submitted as 4, 3, 2, 1 are acknowledged immediately and run as 1, 2, 3, 4."""
    data = batch()
    straight = remote.model()
    straight.backward(data[:2])
    straight.step()
    straight.backward(data[2:])
    straight.step()

    shuffled = remote.model()
    answers: list[Answer] = [
        shuffled.submit_step(4),
        shuffled.submit_pass(data[2:], number=3),
        shuffled.submit_step(2),
        shuffled.submit_pass(data[:2], number=1),
    ]
    refused = [str(answer) for answer in answers if answer.status != 200]
    expect(not refused, f"a step out of order was refused: {refused[:1]}")
    slow = max(answer.seconds for answer in answers)
    expect(slow < PROMPT_ANSWER_S, f"an acknowledgement took {slow:.1f} s")
    for answer in answers:
        remote.wait_for(remote.request_id(answer), "application/x-protobuf, application/json")
    shuffled.next = 5
    difference = max_difference(shuffled.logprobs(), straight.logprobs())
    expect(difference < SAME, f"logprobs differ by {difference:.3g} from those of steps in order")
    return f"acknowledged within {slow * 1000:.0f} ms; logprobs within {difference:.2g}"


@check("S3")
def a_repeated_step_runs_once(remote: Remote) -> str:
    """Repeating a step number returns the id of the first request, and the gradient counts once."""
    data = batch()
    once = remote.model()
    once.backward(data)
    once.backward(data[:1])
    once.step(eps=1.0)
    twice = remote.model()
    first = remote.request_id(twice.submit_pass(data, number=1))
    again = remote.request_id(twice.submit_pass(data, number=1))
    remote.pass_result(first)
    late = remote.request_id(twice.submit_pass(data, number=1))
    expect(first == again == late, f"three ids for one step: {first}, {again}, {late}")
    twice.next = 2
    twice.backward(data[:1])
    twice.step(eps=1.0)
    difference = max_difference(once.logprobs(), twice.logprobs())
    expect(difference < SAME, f"logprobs differ by {difference:.3g}: it ran more than once")
    return f"one id; logprobs within {difference:.2g}"


@check("S3", "wire 5.5")
def repeated_creations_are_the_same_thing(remote: Remote) -> str:
    """A model, sampler or sample requested again with the same number is the first one."""
    body = remote.model_body()
    first, again = (remote.request_id(remote.post("create_model", body)) for _ in range(2))
    expect(first == again, f"create_model again gave {again}, not {first}")
    sampler_body = remote.sampler_body(base_model=remote.base_model)
    ids = [
        remote.expect_ok(remote.post("create_sampling_session", sampler_body)).get(
            "sampling_session_id"
        )
        for _ in range(2)
    ]
    expect(ids[0] == ids[1], f"create_sampling_session again gave {ids}")
    sampler = remote.sampler(base_model=remote.base_model)
    sample = sampler.body(TEXTS[0], max_tokens=2)
    one, two = (remote.post("asample", sample) for _ in range(2))
    expect(remote.request_id(one) == remote.request_id(two), f"asample again gave {two}")
    expect(
        one.json.get("sample_sequence_ids") == two.json.get("sample_sequence_ids"),
        "asample again gave other sequence ids",
    )
    return "model, sampler and sample"


@check("S3")
def steps_are_numbered_from_one(remote: Remote) -> str:
    """A step without a number, or with number 0, is malformed."""
    model = remote.model()
    zero = model.submit_pass(batch(), number=0)
    none = remote.post("optim_step", {"model_id": model.model_id, "adam_params": {}})
    for what, answer in (("number 0", zero), ("no number", none)):
        expect(answer.status in (400, 422), f"{what}: {answer}")
    return f"0 is {zero.status}, none is {none.status}"


@check("S3")
def a_step_after_a_failed_pass_fails_and_clears(remote: Remote) -> str:
    """After a failed pass the next optim_step fails as `user`; then training continues."""
    model = remote.model()
    before = model.logprobs()
    model.backward(batch())
    failed = remote.pass_result(remote.request_id(model.submit_pass(batch(), "no_such_loss")))
    expect(isinstance(failed, Failure), "a pass with an unknown loss succeeded")
    step = remote.result(remote.request_id(model.submit_step()))
    expect(
        isinstance(step, Failure) and step.category == "user",
        f"the optim_step after a failed pass returned {step!r}",
    )
    difference = max_difference(model.logprobs(), before)
    expect(difference < SAME, f"the failed step changed logprobs by {difference:.3g}")
    model.train(1)
    return "fails as user, has no effect, and training continues"


@check("S7")
def a_poll_is_held_and_wakes(remote: Remote) -> str:
    """A poll for work that is waiting is held until the result is ready."""
    model = remote.model()
    waits = remote.request_id(model.submit_pass(batch(), number=2, forward_only=True))
    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(remote.poll, waits, "application/x-protobuf")
        time.sleep(HELD_S)
        early = polled.result() if polled.done() else None
        released = time.monotonic()
        remote.pass_result(
            remote.request_id(model.submit_pass(batch(), number=1, forward_only=True))
        )
        answer = polled.result()
        woke_s = time.monotonic() - released
    expect(
        early is None, f"answered within {HELD_S} s, so clients would poll in a busy loop: {early}"
    )
    expect(answer.status == 200, f"the held poll returned {answer}")
    expect(woke_s < PROMPT_ANSWER_S, f"the poll returned {woke_s:.1f} s after the result was ready")
    return f"held; result {woke_s * 1000:.0f} ms after the work could run"

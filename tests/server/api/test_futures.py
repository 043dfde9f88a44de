"""Results: long polls, formats, cancellation."""

import asyncio
import time
from pathlib import Path

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.protobuf import decode_forward_backward_output

pytestmark = pytest.mark.anyio


async def test_a_waiting_poll_is_woken_by_the_result(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    waits_s = []
    for seq_id in range(1, 8):
        await _emptied(echo)
        echo.open.clear()
        request = await api.optim_step(model, seq_id)
        poll = asyncio.create_task(api.poll(request))
        await echo.entered.acquire()
        done, _ = await asyncio.wait({poll}, timeout=0.05)
        assert not done
        began_s = time.perf_counter()
        echo.open.set()
        answer = await poll
        waits_s.append(time.perf_counter() - began_s)
        assert answer.json == {"metrics": {"value:sum": 0.0}}
    # A commit and an answer; a server that polls a table would need its interval. The best of
    # several, because the machine may be busy.
    assert min(waits_s) < 0.03


async def test_a_poll_times_out_with_try_again_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, long_poll_s=0.05) as api:
        model = await api.model()
        echo.open.clear()
        request = await api.optim_step(model, 1)
        answer = await api.poll(request, accept=PROTOBUF_TYPE)
        assert answer.status == 408
        assert answer.json == {
            "type": "try_again",
            "request_id": request,
            "queue_state": "active",
        }
        monkeypatch.setattr(echo, "waiting_for", lambda _: "the engine has not responded for 61 s")
        answer = await api.poll(request)
        assert answer.json["queue_state"] == "paused_capacity"
        assert answer.json["queue_state_reason"] == "the engine has not responded for 61 s"
        echo.open.set()
        assert await api.value(request) == 0


@pytest.mark.parametrize("reason", [None, "the engine is starting"])
async def test_a_client_can_ask_to_know_early_that_its_request_is_paused(
    tmp_path: Path, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, long_poll_s=2.0) as api:
        model = await api.model()
        echo.open.clear()
        request = await api.optim_step(model, 1)
        await echo.entered.acquire()
        monkeypatch.setattr(echo, "waiting_for", lambda _: reason)

        async def poll(after: str) -> tuple[float, int]:
            began_s = time.perf_counter()
            body = {"request_id": request}
            header = {"X-Tinkex-Queue-State-After": after}
            answer = await api.post("retrieve_future", body, headers=header)
            return time.perf_counter() - began_s, answer.status

        took_s, status = await poll("0.1")
        assert status == 408
        assert (took_s < 1.9) is (reason is not None)  # a request that runs is held as ever
        took_s, status = await poll("nan")
        assert status == 408
        assert took_s > 1.9
        polled = asyncio.create_task(poll("0.1"))
        monkeypatch.setattr(echo, "waiting_for", lambda _: None)
        await asyncio.sleep(0.3)
        echo.open.set()
        took_s, status = await polled
        assert status == 200  # the result ends the rest of the poll too
        assert took_s < 1.9


async def test_a_result_can_be_read_many_times_and_after_a_restart(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path) as api:
        model = await api.model()
        request = await api.optim_step(model, 1)
        first = await api.result(request)
        assert await api.result(request) == first
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert await api.result(request) == first


async def test_a_pass_is_sent_as_protobuf_only_on_request(api: Api) -> None:
    model = await api.model()
    request = await api.forward_backward(model, 1, tokens=2)
    await api.passed(request)
    for accept in (PROTOBUF_TYPE, f"{PROTOBUF_TYPE}, application/json"):
        answer = await api.poll(request, accept=accept)
        assert answer.content_type == PROTOBUF_TYPE
        assert decode_forward_backward_output(answer.body).metrics["gradient:sum"] == 2
    plain = await api.poll(request)
    assert plain.content_type == "application/json"
    assert plain.json == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": [0.5, 0.5], "dtype": "float32", "shape": [2]}}],
        "metrics": {"loss:sum": 0.0, "gradient:sum": 2.0},
    }


async def test_json_results_stay_json_whatever_the_accept_header(api: Api) -> None:
    model = await api.model()
    request = await api.optim_step(model, 1)
    await api.result(request)
    answer = await api.poll(request, accept=PROTOBUF_TYPE)
    assert answer.content_type == "application/json"


async def test_a_large_result_is_announced_if_the_client_allows_it(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path, metadata_only_bytes=1000) as api:
        model = await api.model()
        request = await api.forward_backward(model, 1, tokens=30_000)
        output = await api.passed(request)
        announced = await api.poll(request, metadata_only=True, accept=PROTOBUF_TYPE)
        whole = await api.poll(request, metadata_only=False, accept=PROTOBUF_TYPE)
        assert announced.json == {
            "status": "complete_metadata",
            "response_payload_size": len(whole.body),
        }
        assert len(output.loss_fn_outputs[0]["logprobs"].data) == 30_000
        # Payload and result are stored as separate files.
        assert files_in(tmp_path / "payloads") == 1
        assert files_in(tmp_path / "results") == 1
        small = await api.optim_step(model, 2)
        assert (await api.poll(small, metadata_only=True)).json["metrics"]


async def test_hundreds_of_polls_cost_nothing_while_they_wait(tmp_path: Path) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, long_poll_s=30.0) as api:
        model = await api.model()
        await _emptied(echo)
        echo.open.clear()
        request = await api.optim_step(model, 1)
        await echo.entered.acquire()
        polls = [asyncio.create_task(api.poll(request)) for _ in range(500)]
        # Arriving polls cost CPU time; held polls do not.
        spent_s = 1.0
        for _ in range(20):
            began_s = time.process_time()
            await asyncio.sleep(0.5)
            spent_s = time.process_time() - began_s
            if spent_s < 0.025:
                break
        assert spent_s < 0.025
        echo.open.set()
        answers = await asyncio.gather(*polls)
    assert {answer.status for answer in answers} == {200}


async def test_a_cancelled_sample_fails_as_cancelled(tmp_path: Path) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, long_poll_s=30.0) as api:
        body = {
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {},
            "base_model": BASE,
        }
        echo.open.clear()
        given_up, wanted = [(await api.post("asample", body)).json["request_id"] for _ in range(2)]
        for _ in range(2):
            await echo.entered.acquire()
        waiting = asyncio.create_task(api.poll(given_up))
        for _ in range(2):
            assert (await api.post("cancel_future", {"request_id": given_up})).status == 200
        assert (await waiting).json == {
            "error": "cancelled: the client gave up on it.",
            "category": "user",
        }
        echo.open.set()
        assert "sequences" in (await api.poll(wanted)).json
        assert echo.tasks() == ["sample"]
        # A finished sample is not affected.
        await api.post("cancel_future", {"request_id": wanted})
        assert "sequences" in (await api.poll(wanted)).json
    async with hosted(echo, tmp_path) as api:
        assert (await api.poll(given_up)).json["category"] == "user"
        assert (await api.post("cancel_future", {"request_id": "unknown"})).status == 200


async def test_cancelling_is_harmless(api: Api) -> None:
    model = await api.model()
    request = await api.optim_step(model, 1)
    for _ in range(2):
        assert (await api.post("cancel_future", {"request_id": request})).status == 200
    assert await api.value(request) == 0


def files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


async def _emptied(echo: EchoExecutor) -> None:
    """Forget the requests that have arrived so far."""
    while not echo.entered.locked():
        await echo.entered.acquire()

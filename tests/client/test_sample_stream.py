"""Streamed samples (H11): each token once, and at the end the response of `sample`."""

import asyncio
import gc
import threading

import pytest

import tinkex
from tinkex import SamplingParams, types
from tinkex.client.http.sse import Consumed
from tinkex.client.http.transport import Request, StreamedResponse, Unreachable
from tinkex.testing import Answer, FakeService, Lost
from waiting import until

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=7, seed=1)


@pytest.fixture
def sampling(service):
    return service.create_sampling_client(base_model="fake/model")


def test_an_error_about_arguments_names_the_method(sampling):
    for method in (sampling.sample, sampling.sample_stream):
        name = rf"SamplingClient\.{method.__name__}\(\)"
        with pytest.raises(TypeError, match=f"{name} missing 2 required"):
            method(PROMPT)
        with pytest.raises(TypeError, match=f"{name} got an unexpected keyword argument 'x'"):
            method(PROMPT, 1, PARAMS, x=1)


def gathered(events):
    """The tokens and logprobs of each sequence."""
    tokens, logprobs = {}, {}
    for event in events:
        tokens.setdefault(event.sequence, []).extend(event.tokens)
        logprobs.setdefault(event.sequence, []).extend(event.logprobs)
    return tokens, logprobs


def plain(answer):
    return [(s.tokens, s.logprobs, s.stop_reason) for s in answer.sequences]


def asked(fake, endpoint):
    return [seen for seen in fake.requests if seen.endpoint == endpoint]


class Network:
    """The fake service over a network that the test breaks or stalls after a number of pieces."""

    def __init__(self, fake: FakeService, *, passes: int = 10**9, then: str = "cut") -> None:
        self._transport = fake.transport("http://fake.invalid")
        self._passes = passes
        self._then = then
        self.stalled = threading.Event()
        self.closed = threading.Event()

    def client(self):
        return tinkex.ServiceClient(
            base_url="http://fake.invalid", api_key="tml-x", _make_transport=lambda *_: self
        )

    async def send(self, request: Request):
        return await self._transport.send(request)

    async def stream(self, request: Request) -> StreamedResponse:
        inner = await self._transport.stream(request)

        async def read() -> bytes:
            if not self._passes:
                if self._then == "cut":
                    raise Unreachable("connection reset")
                self.stalled.set()
                await asyncio.Event().wait()
            self._passes -= 1
            return await inner.read()

        return StreamedResponse(
            status_code=inner.status_code,
            headers=inner.headers,
            request=inner.request,
            read=read,
            close=self.closed.set,
        )

    async def close(self) -> None:
        await self._transport.close()


def test_events_add_up_to_the_response_of_sample(fake, sampling):
    stream = sampling.sample_stream(PROMPT, 2, PARAMS, include_prompt_logprobs=True)
    events = list(stream)
    answer = stream.response(5)
    tokens, logprobs = gathered(events)
    assert [tokens[i] for i in range(2)] == [s.tokens for s in answer.sequences]
    assert [logprobs[i] for i in range(2)] == [s.logprobs for s in answer.sequences]
    same = sampling.sample(PROMPT, 2, PARAMS, include_prompt_logprobs=True).result(5)
    assert plain(answer) == plain(same)
    assert answer.prompt_logprobs == same.prompt_logprobs
    assert all(s.sequence_id.startswith("q-") for s in answer.sequences)
    assert not asked(fake, "asample")[1:]  # the stream needed none
    with pytest.raises(AttributeError):
        events[0].sequence = 3


def test_async_for_gives_the_same_events(sampling):
    async def read():
        async with sampling.sample_stream(PROMPT, 1, PARAMS) as stream:
            events = [event async for event in stream]
            return gathered(events), await stream.response_async(5)

    (tokens, _), answer = asyncio.run(read())
    assert tokens == {0: answer.sequences[0].tokens}


def test_reading_a_stream_twice_is_an_error(sampling):
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    assert list(stream)
    with pytest.raises(Consumed, match=r"response\(\)"):
        list(stream)
    assert stream.response(5).sequences[0].tokens


def test_the_response_comes_without_reading_and_the_events_are_kept(sampling):
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    answer = stream.response(5)
    assert gathered(stream)[0] == {0: answer.sequences[0].tokens}


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_broken_stream_is_completed_by_its_request_id(fake, passes):
    network = Network(fake, passes=passes)
    with network.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        stream = sampling.sample_stream(PROMPT, 2, PARAMS)
        events = list(stream)
        answer = stream.response(5)
    tokens, _ = gathered(events)
    assert [tokens[i] for i in range(2)] == [s.tokens for s in answer.sequences]
    assert len(asked(fake, "stream_sample")) == 1
    assert len(asked(fake, "retrieve_future")) == 1
    assert network.closed.is_set()


def test_a_stream_without_a_last_event_is_completed_too(fake, sampling):
    first = sampling.sample(PROMPT, 1, PARAMS).result(5)
    request_id = first.sequences[0].sequence_id[2:-2]
    accepted = f'{{"request_id":"{request_id}","sample_sequence_ids":["a"]}}'
    body = f"event: accepted\ndata: {accepted}\n\n: the server is stopping\n\n".encode()
    fake.script("stream_sample", Answer(status=200, body=body))
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    assert gathered(stream)[0] == {0: first.sequences[0].tokens}
    assert stream.response(5).sequences[0].sequence_id == "a"


def test_a_lost_request_is_sent_again_under_its_seq_id(fake, sampling):
    fake.script("stream_sample", Lost(), Lost(after=True), Answer(status=200, body=b""))
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    assert stream.response(10).sequences[0].tokens == [1, 2, 3, 1, 2, 3, 1]
    assert len({seen.json()["seq_id"] for seen in asked(fake, "stream_sample")}) == 1
    assert len(asked(fake, "stream_sample")) == 4


def test_a_429_is_waited_out(fake, sampling):
    fake.script("stream_sample", Answer(status=429, body={}, headers={"retry-after-ms": "1"}))
    assert list(sampling.sample_stream(PROMPT, 1, PARAMS))


def test_a_service_without_streams_gives_all_tokens_at_the_end(fake, sampling):
    fake.script("stream_sample", Answer(status=404, body={"detail": "Not Found"}))
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    (event,) = stream
    assert event.tokens == stream.response(5).sequences[0].tokens
    assert len(asked(fake, "asample")) == 1


def test_errors_are_raised_by_reading_and_by_the_response(sampling):
    stream = sampling.sample_stream(types.ModelInput.from_ints([]), 1, PARAMS)
    with pytest.raises(tinkex.RequestFailedError, match="the prompt is empty") as caught:
        list(stream)
    assert caught.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinkex.RequestFailedError):
        stream.response(5)


def failing(*tokens: int) -> Answer:
    """A sample that fails on the server after these tokens."""
    events = ['event: accepted\ndata: {"request_id":"r","sample_sequence_ids":["a"]}']
    for token in tokens:
        shown = f'{{"sequence":0,"tokens":[{token}],"logprobs":[-0.5]}}'
        events.append(f"event: token\ndata: {shown}")
    events.append('event: error\ndata: {"error":"out of memory","category":"server"}')
    return Answer(status=200, body="".join(f"{event}\n\n" for event in events).encode())


def test_a_sample_that_failed_before_its_first_token_is_retried(fake, sampling):
    fake.script("stream_sample", failing())
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    assert gathered(stream)[0] == {0: [1, 2, 3, 1, 2, 3, 1]}
    first, second = (seen.json()["seq_id"] for seen in asked(fake, "stream_sample"))
    assert first != second


def test_a_sample_that_failed_later_is_not_retried(fake, sampling):
    fake.script("stream_sample", failing(9))
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    assert next(stream).tokens == [9]
    with pytest.raises(tinkex.RequestFailedError, match="out of memory"):
        next(stream)
    assert len(asked(fake, "stream_sample")) == 1


def test_arguments_are_validated_like_those_of_sample(sampling):
    with pytest.raises(ValueError, match="prompt_logprobs_last_n"):
        sampling.sample_stream(PROMPT, 1, PARAMS, prompt_logprobs_last_n=3)


def test_an_invalid_event_is_an_error(fake, sampling):
    fake.script("stream_sample", Answer(status=200, body=b"data: hello\n\n"))
    with pytest.raises(tinkex.APIResponseValidationError, match="first event"):
        list(sampling.sample_stream(PROMPT, 1, PARAMS))


@pytest.mark.parametrize("how", ["closed", "forgotten", "left"])
def test_an_abandoned_stream_cancels_its_sample(how):
    fake = FakeService(dynamic_config={"sample_cancel_enabled": True})
    network = Network(fake, passes=2, then="stall")
    with network.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        stream = sampling.sample_stream(PROMPT, 1, PARAMS)
        assert next(stream).tokens == [1]
        assert network.stalled.wait(5)
        if how == "closed":
            stream.close()
            assert list(stream) == []
        elif how == "left":
            with stream:
                pass
        del stream
        gc.collect()
        assert network.closed.wait(5)
        until(lambda: fake.cancelled)
    assert len(fake.cancelled) == 1


def test_a_slow_reader_gets_several_tokens_at_once(fake):
    network = Network(fake, passes=3, then="stall")
    with network.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        stream = sampling.sample_stream(PROMPT, 1, PARAMS)
        assert network.stalled.wait(5)  # both token events have arrived
        assert next(stream).tokens == [1, 2, 3, 1, 2, 3, 1]
        stream.close()


def test_blocking_reads_in_a_coroutine_warn(fake):
    network = Network(fake, passes=1, then="stall")

    async def read(sampling):
        stream = sampling.sample_stream(PROMPT, 1, PARAMS)
        threading.Timer(0.2, stream.close).start()
        next(stream, None)

    with network.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        with pytest.warns(RuntimeWarning, match=r"await anext\(stream\)"):
            asyncio.run(read(sampling))


def test_a_closed_client_ends_its_streams_with_the_reason(fake):
    network = Network(fake, passes=2, then="stall")
    service = network.client()
    sampling = service.create_sampling_client(base_model="fake/model")
    stream = sampling.sample_stream(PROMPT, 1, PARAMS)
    assert next(stream).tokens == [1]
    service.close("success").result(5)
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_it_works_over_a_real_socket(loopback):
    with tinkex.ServiceClient(base_url=loopback.url) as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        stream = sampling.sample_stream(PROMPT, 1, PARAMS)
        assert gathered(stream)[0] == {0: [1, 2, 3, 1, 2, 3, 1]}

"""Decodes the payloads of orders. Images take up to seconds, so other threads decode them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tinkex.engine.input_checks import NONE_PREPARED, PreparedImages
from tinkex.engine.request_images import (
    Holder,
    NamedInput,
    RequestImages,
    has_images,
    inputs_of,
)
from tinkex.wire import engine_protocol
from tinkex.wire.codec import decode_json
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import decode_forward_backward_request
from tinkex.wire.sample_controls import StoredSampleRequest
from tinkex.wire.training import ForwardBackwardInput

#: Sample requests, and passes, whose images are decoded at the same time.
DECODED_REQUESTS = 8
#: Where images are read, sample requests of more bytes are decoded in another thread.
SMALL_PAYLOAD = 1 << 16


class DecodedPass(NamedTuple):
    work: ForwardBackwardInput
    images: PreparedImages | None


class DecodedSample(NamedTuple):
    request: StoredSampleRequest
    images: PreparedImages


class OrderDecoder:
    """
    Passes and samples apart, so that passes delay no sample. Requests take turns, image by image.

    Decoded images stay until `release`.
    """

    def __init__(self, images: RequestImages | None, wake: Callable[[Future[Any]], None]) -> None:
        """`wake` is called when something is decoded; `images` is None where none are read."""
        self._images, self._wake = images, wake
        self._samples = ThreadPoolExecutor(DECODED_REQUESTS, "tinkex-sample-images")
        self._passes = ThreadPoolExecutor(DECODED_REQUESTS, "tinkex-pass-images")
        #: Set when the images of a model's last pass are decoded.
        self._last_decoded: dict[str, threading.Event] = {}

    def sample(self, order: engine_protocol.Order) -> DecodedSample | Future[DecodedSample]:
        """At once if there is only text. Raises what is wrong with the request."""
        if self._images is None or _is_small(order.sample.payload):
            request = _sample_request(order)
            if self._images is None or not has_images(_inputs_of_sample(request)):
                return DecodedSample(request, NONE_PREPARED)
        waiting = self._samples.submit(self._sample_with_images, order, self._images)
        waiting.add_done_callback(self._wake)
        return waiting

    def text_pass(self, order: engine_protocol.Order) -> DecodedPass:
        """A pass where no images are read: whatever is not text is refused later."""
        return DecodedPass(_pass_input(order), None)

    def start_pass(self, order: engine_protocol.Order) -> Future[DecodedPass] | None:
        """
        Begins with the images of a pass, long before its turn.

        None where no images are read: then `text_pass` decodes it in its turn.
        """
        images = self._images
        if images is None:
            return None
        found: Future[DecodedPass] = Future()
        try:
            work = _pass_input(order)
        except Exception as error:  # noqa: BLE001  reported when it is the turn of the pass
            found.set_exception(error)
            return found
        inputs = inputs_of(work)
        if not has_images(inputs):
            found.set_result(DecodedPass(work, NONE_PREPARED))
            return found
        model_id = order.run_pass.model_id
        holder = Holder(order.ticket, f"model {model_id}")
        self._last_decoded = {
            name: decoded for name, decoded in self._last_decoded.items() if not decoded.is_set()
        }
        before, own = self._last_decoded.get(model_id), threading.Event()
        self._last_decoded[model_id] = own

        def decode() -> DecodedPass:
            # A later pass must not take the room that this one waits for.
            if before is not None:
                before.wait()
            try:
                return DecodedPass(work, images.prepare(inputs, holder))
            finally:
                own.set()

        found = self._passes.submit(decode)
        found.add_done_callback(self._wake)
        return found

    def release(self, ticket: int) -> None:
        """When a request is done."""
        if self._images is not None:
            self._images.release(ticket)

    @staticmethod
    def _sample_with_images(order: engine_protocol.Order, images: RequestImages) -> DecodedSample:
        request = _sample_request(order)
        holder = Holder(order.ticket, order.sample.owner)
        return DecodedSample(request, images.prepare(_inputs_of_sample(request), holder))


def payload_bytes(payload: frames_pb2.Payload) -> bytes:
    if payload.WhichOneof("source") == "file":
        return Path(payload.file).read_bytes()
    return payload.inline


def _is_small(payload: frames_pb2.Payload) -> bool:
    return payload.WhichOneof("source") == "inline" and len(payload.inline) <= SMALL_PAYLOAD


def _sample_request(order: engine_protocol.Order) -> StoredSampleRequest:
    return decode_json(StoredSampleRequest, payload_bytes(order.sample.payload))


def _inputs_of_sample(request: StoredSampleRequest) -> list[NamedInput]:
    return [NamedInput("prompt", request.prompt)]


def _pass_input(order: engine_protocol.Order) -> ForwardBackwardInput:
    request, _ = decode_forward_backward_request(payload_bytes(order.run_pass.payload))
    return request.forward_backward_input

"""What a training step is before and after it is sent: its parts, their bytes, and what became of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinkex.client.errors import APIStatusError
from tinkex.client.ordering import Fate
from tinkex.client.retry import is_retryable
from tinkex.extras import needs
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import encode_forward_backward_request
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest, LossFnType

log = logging.getLogger("tinkex.training")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One numbered submission of a step; most steps have one, a large batch several."""

    path: str
    #: seq_id -> body. Called inside the turn, and again by nobody: repeats send the same bytes.
    encode: Callable[[int], bytes]
    size_bytes: int = 0
    content_type: str = JSON_TYPE
    adds_gradients: bool = False


@dataclass(frozen=True)
class Accepted:
    """A submission that the server has taken."""

    request_id: str
    round_trip_s: float


@dataclass(kw_only=True)
class Submission:
    """A part under its number, and what is known of it."""

    part: Part
    number: int
    fate: Fate = Fate.UNSENT
    accepted: Accepted | None = None
    error: Exception | None = None

    def leaves(self) -> None:
        """Called just before bytes are sent: from now on the server may have it."""
        self.fate = Fate.UNKNOWN

    def refused(self, error: APIStatusError, *, before: Fate) -> None:
        """
        One attempt was answered with an error; `before` is the fate ahead of that attempt.

        A server that says no does not have it, unless it got it from an earlier attempt that
        nobody answered. Other errors may come from a gateway that passed the request on.
        """
        says_no = error.status_code == 429 or not is_retryable(error)
        if says_no and before is not Fate.UNKNOWN:
            self.fate = Fate.REFUSED


async def all_of(work: Any) -> list[Any]:
    """Like gather, but the first failure stops the others: nobody will look at them."""
    tasks = [asyncio.ensure_future(each) for each in work]
    if len(tasks) == 1:
        return [await tasks[0]]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pass_encoder(
    model_id: str,
    data: list[Datum],
    loss_fn: LossFnType,
    loss_fn_config: dict[str, float | str] | None,
    *,
    forward_only: bool,
) -> Callable[[int], bytes]:
    def encode(number: int) -> bytes:
        return encode_forward_backward_request(
            ForwardBackwardRequest(
                forward_backward_input=ForwardBackwardInput(
                    data=data, loss_fn=loss_fn, loss_fn_config=loss_fn_config
                ),
                model_id=model_id,
                seq_id=number,
            ),
            forward_only=forward_only,
        )

    return encode


def filler(model_id: str, half_a_batch: bool) -> Part:
    """
    A step for a number that was given out and not used.

    Usually a pass over one token that changes nothing. After half a batch was taken, it must not
    count: then the server has to fail the filler, and with it the next `optim_step`, instead of
    stepping on half the gradients. So it has two targets for its one token, which no server can
    compute, with weight zero, should one do so all the same. Its setting, which no loss has, says
    to the user what happened.
    """
    targets = 2 if half_a_batch else 1
    datum = Datum(
        model_input=ModelInput.from_ints([0]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=[0] * targets, dtype="int64"),
            "weights": TensorData(data=[0.0] * targets, dtype="float32"),
        },
    )
    config: dict[str, float | str] | None = (
        {"part_of_this_batch_was_never_sent": 1.0} if half_a_batch else None
    )
    return Part(
        path="forward_backward",
        encode=pass_encoder(
            model_id, [datum], "cross_entropy", config, forward_only=not half_a_batch
        ),
        content_type=PROTOBUF_TYPE,
    )


def compressed(body: bytes) -> bytes | None:
    """The body compressed, or None where nothing here can: servers take both."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd

            return zstd.compress(body, level=1)
        with needs("Compressing batches"):
            import zstandard
    except ImportError:
        _say_once_that_bodies_stay_large()
        return None
    return bytes(zstandard.ZstdCompressor(level=1).compress(body))


@functools.cache
def _say_once_that_bodies_stay_large() -> None:
    log.debug(
        "The server asks for compressed batches, and there is no zstd here: sent as they are. "
        "pip install 'tinkex[zstd]', or use Python 3.14."
    )

"""
Differences between versions of the official client, all in this module.

Unknown versions, and versions newer than the last one checked, are treated as the newest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tinkex.wire.errors import UserFailure
from tinkex.wire.sampling import SampledSequence, SampleResponse
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardOutput

__all__ = ["NEWEST", "SdkVersion", "wants_protobuf"]

Version = tuple[int, int, int]

#: The oldest and newest release that this table was checked against.
OLDEST: Final[Version] = (0, 4, 1)
NEWEST: Final[Version] = (0, 36, 0)

#: The first release that cancels samples on the server when its user cancels them.
CANCELS_SAMPLES: Final[Version] = (0, 26, 0)

#: Flags for `client/config`, by the releases [first, last] that receive them. Not set, although
#: some releases know them: `parallel_fwdbwd_chunks` and `use_pyqwest_transport` (the defaults are
#: right); `proto_compress_fwdbwd` (a local network is faster than zstd); `pjwt_auth_enabled`, which
#: the server sets; gRPC.
_CLIENT_CONFIG: Final[tuple[tuple[Version, Version, Mapping[str, Any]], ...]] = (
    # Passes as protobuf: faster on both sides, and it can represent NaN.
    ((0, 19, 0), (0, 24, 1), {"proto_write_fwdbwd": True}),
    # Only together with the flag above: JSON would lose `forward_only` and run a backward pass.
    ((0, 22, 3), (0, 24, 1), {"fwd_via_fwdbwd": True}),
    # A model from a checkpoint: one request instead of weights_info, create_model and load_weights.
    ((0, 24, 1), (0, 36, 0), {"create_model_via_load_weights": True}),
    # One poll for all samples of a client; each result is fetched when it is ready.
    ((0, 26, 2), (0, 36, 0), {"sample_use_retrieve_futures": True}),
    # Copies of a client get a unique clone id instead of a random one.
    ((0, 32, 0), (0, 36, 0), {"sample_join_sampling_session": True}),
    # Custom losses run on the server: one pass instead of two.
    ((0, 36, 0), (0, 36, 0), {"custom_loss_server_side": True}),
)


@dataclass(frozen=True, slots=True)
class SdkVersion:
    """A version of the official client, and what it needs."""

    version: Version = NEWEST
    #: Whether the client named a release; other clients get no flags.
    is_release: bool = False

    @classmethod
    def of(cls, sdk_version: str | None) -> Self:
        """Parse a version string; None and invalid strings give the newest version."""
        numbers = re.match(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", sdk_version or "")
        if numbers is None:
            return cls()
        version = (int(numbers[1]), int(numbers[2]), int(numbers[3] or 0))
        # Older than any release, so it is not a version of the official client.
        return cls() if version < OLDEST else cls(version, is_release=True)

    def client_config(self) -> dict[str, Any]:
        """The response to `client/config`: flags that this release knows; {} for other versions."""
        flags: dict[str, Any] = {}
        for first, last, values in _CLIENT_CONFIG:
            if self.is_release and first <= self.version <= last:
                flags |= values
        return flags

    def dynamic_config(self) -> dict[str, Any]:
        """The response to `client/dynamic_config`: enables cancellation if it is supported."""
        return {"sample_cancel_enabled": True} if self.version >= CANCELS_SAMPLES else {}

    @property
    def exchanges_tokens(self) -> bool:
        """Whether `pjwt_auth_enabled` makes the client exchange its key for a token."""
        return self.is_release and (0, 18, 0) <= self.version <= NEWEST

    @property
    def unnamed_sampler_save_has_path(self) -> bool:
        """Clients before 0.20 reject a `path` in the result of an unnamed sampler save."""
        return self.version >= (0, 20, 0)

    @property
    def knows_external_checkpoints(self) -> bool:
        """Clients before 0.28 fail on a list that contains an external checkpoint."""
        return self.version >= (0, 28, 0)

    @property
    def reads_protobuf_only(self) -> bool:
        """Clients from 0.25 on reject a JSON result of a pass or a sample."""
        return self.version >= (0, 25, 0)

    def reads_as_protobuf(self, output: ForwardBackwardOutput) -> bool:
        """
        Whether this client can read the result of a pass as protobuf.

        Clients up to 0.24.0 decode all examples with the shape of the first record. If the shapes
        differ (such as targets of [5, 8] and [5, 2]) they need JSON, which they accept as well.
        """
        return self.version >= (0, 24, 1) or sum(1 for _ in output.runs()) <= 1

    def forward_backward_json(self, output: ForwardBackwardOutput) -> dict[str, Any]:
        """The JSON result of a pass; `UserFailure` for values that JSON cannot represent."""
        for name, value in output.metrics.items():
            _check_finite(value, f"metric {name}")
        return {
            "loss_fn_output_type": output.loss_fn_output_type,
            "loss_fn_outputs": [
                {name: _tensor_json(tensor, f"{name} of datum {i}") for name, tensor in o.items()}
                for i, o in enumerate(output.loss_fn_outputs)
            ],
            "metrics": dict(output.metrics),
        }

    def sample_json(self, response: SampleResponse) -> dict[str, Any]:
        """The JSON result of a sample. Prompt logprobs that are NaN become null."""
        answer: dict[str, Any] = {
            "type": "sample",
            "sequences": [_sequence_json(sequence) for sequence in response.sequences],
        }
        if response.prompt_logprobs is not None:
            for number in response.prompt_logprobs:
                _check_finite(0.0 if number is None else number, "a prompt logprob")
            answer["prompt_logprobs"] = response.prompt_logprobs
        if response.topk_prompt_logprobs is not None:
            answer["topk_prompt_logprobs"] = response.topk_prompt_logprobs
        if self.version >= (0, 23, 0):
            answer["prompt_cache_hit_tokens"] = response.prompt_cache_hit_tokens
        return answer


def wants_protobuf(accept: str | None) -> bool:
    """Whether the Accept header of a poll allows protobuf."""
    return "application/x-protobuf" in (accept or "").lower()


def _sequence_json(sequence: SampledSequence) -> dict[str, Any]:
    answer: dict[str, Any] = {"stop_reason": sequence.stop_reason, "tokens": sequence.tokens}
    if sequence.logprobs is not None:
        for number in sequence.logprobs:
            _check_finite(number, "a sampled logprob")
        answer["logprobs"] = sequence.logprobs
    return answer


def _tensor_json(tensor: TensorData, what: str) -> dict[str, Any]:
    """Dense, with only the three keys that every version accepts."""
    import numpy as np

    array = tensor.to_numpy()
    if not np.isfinite(array).all():
        _check_finite(array[~np.isfinite(array)].flat[0], what)
    return {
        "data": array.reshape(-1).tolist(),
        "dtype": tensor.dtype,
        "shape": list(array.shape),
    }


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise UserFailure(
            f"{what} is {value}, and this SDK version reads JSON, which cannot represent it. "
            "SDK 0.25 and newer fetch results as protobuf and can."
        )

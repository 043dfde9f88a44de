"""The toy model of the fake: all tokens have the same logprob, which rises with each step."""

import itertools
import math
from typing import Any, Literal

from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import EncodedTextChunk, ModelInput
from tinkex.wire.sampling import (
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TopkLogprobs,
)
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardOutput


def toy_logprob(steps: int) -> float:
    """The logprob of every token after `steps` optimizer steps."""
    return -math.log(2) / (1 + steps)


def toy_pass(work: ForwardBackwardInput, steps: int) -> ForwardBackwardOutput:
    known = {"clip_low_threshold", "clip_high_threshold", "beta"}
    if unknown := set(work.loss_fn_config or ()) - known:
        raise UserFailure(f"loss_fn_config: unknown setting {', '.join(sorted(unknown))}")
    outputs, loss = [], 0.0
    for index, datum in enumerate(work.data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise UserFailure(f"datum {index} has no target_tokens")
        values = [toy_logprob(steps)] * len(targets.data)
        weights = datum.loss_fn_inputs.get("weights")
        loss -= sum(
            logprob * weight
            for logprob, weight in zip(
                values, weights.data if weights else [1.0] * len(values), strict=True
            )
        )
        outputs.append({"logprobs": TensorData(data=values, dtype="float32", shape=targets.shape)})
    return ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": loss})


def _tokens(prompt: ModelInput) -> list[int]:
    """Other chunks than text are token 0, as often as the sender expects it, or once."""
    found: list[int] = []
    for chunk in prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            found += chunk.tokens
        else:
            found += [0] * (getattr(chunk, "expected_tokens", None) or 1)
    return found


def toy_sample(request: SampleRequest, steps: int) -> SampleResponse:
    """Repeats the prompt up to `max_tokens`."""
    prompt = _tokens(request.prompt)
    if not prompt:
        raise UserFailure("the prompt is empty")
    logprob = toy_logprob(steps)
    count = request.sampling_params.max_tokens or len(prompt)
    tokens = list(itertools.islice(itertools.cycle(prompt), count))
    sequence = SampledSequence(
        "length",
        "",
        tokens,  # type: ignore[arg-type]
        [logprob] * count,  # type: ignore[arg-type]
    )
    if request.topk_sample_logprobs:
        rows = [[(token, logprob)] for token in tokens]
        sequence = sequence.model_copy(update={"topk_logprobs_np": TopkLogprobs.from_rows(rows)})
    answer: dict[str, Any] = {"sequences": [sequence] * request.num_samples}
    if request.prompt_logprobs:
        last_n = request.prompt_logprobs_last_n or len(prompt)
        first = max(1, len(prompt) - last_n)
        answer["prompt_logprobs_np"] = [math.nan] * first + [logprob] * (len(prompt) - first)
    if request.topk_prompt_logprobs:
        rows = [[(token, logprob)] for token in prompt[1:]]
        answer["topk_prompt_logprobs_np"] = TopkLogprobs.from_rows([None, *rows])
    if (wanted := request.target_prompt_logprobs) is not None:
        shape = list(wanted.to_numpy().shape)
        answer["target_prompt_logprobs"] = _filled(logprob, "float32", shape)
    if request.prompt_alt_tokens_k:
        shape = [len(prompt), request.prompt_alt_tokens_k]
        answer["prompt_alt_tokens"] = PromptAltTokens(
            _filled(prompt[0], "int64", shape), _filled(logprob, "float32", shape)
        )
    return SampleResponse(**answer)


def _filled(value: float, dtype: Literal["int64", "float32"], shape: list[int]) -> TensorData:
    return TensorData(data=[value] * math.prod(shape), dtype=dtype, shape=shape)

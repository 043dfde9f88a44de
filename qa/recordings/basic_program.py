"""
A small program for any release of the official client, and the objects it sends.

`record.py` runs it with the official client and records every request. Tests build the same objects
from `tinkex.types` and compare the output of our encoders. Therefore the builders take the `types`
module as an argument, and this file imports neither package at the top.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from typing import Any

BASE_MODEL = "tiny/model"
TOKENS = [1, 17, 99, 4, 2]


def datum(types: Any, **inputs: Any) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


def cross_entropy(types: Any) -> list[Any]:
    """Lists, and positive and negative weights."""
    return [
        datum(types, target_tokens=[17, 99, 4, 2, 0], weights=[0.0, 1.0, -2.5, 0.125, 1.0]),
        datum(types, target_tokens=[1, 2, 3, 4, 5], weights=[1.0, 1.0, 1.0, 1.0, 1.0]),
    ]


def arrays(types: Any) -> list[Any]:
    """NumPy arrays of dtypes that are converted, and hand-made tensors, one of them without a shape."""
    import numpy as np

    return [
        datum(
            types,
            target_tokens=np.array([17, 99, 4, 2, 0], dtype=np.int32),
            logprobs=np.array([-0.5, -1.5, -0.25, -3.0, -0.125], dtype=np.float64),
            advantages=np.array([1.0, -1.0, 0.5, 0.0, 2.0], dtype=np.float32),
        ),
        types.Datum(
            model_input=types.ModelInput(
                chunks=[types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
            ),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64"),
                "logprobs": types.TensorData(data=[-1.0, -2.0, -0.5], dtype="float32", shape=[3]),
                "advantages": types.TensorData(data=[0.5, 0.5, 0.5], dtype="float32", shape=[3]),
            },
        ),
    ]


def sparse(types: Any) -> list[Any]:
    """2-D targets and weights as torch tensors; the first pair is sent as CSR, the second dense."""
    import torch

    targets = torch.zeros(5, 8, dtype=torch.int64)
    weights = torch.zeros(5, 8)
    for row, column, token, weight in [(0, 1, 17, 1.0), (2, 0, 9, -0.5), (2, 7, 5, 0.25)]:
        targets[row, column], weights[row, column] = token, weight
    full = torch.arange(1, 11).reshape(5, 2)
    return [
        datum(types, target_tokens=targets, weights=weights),
        datum(types, target_tokens=full, weights=full.to(torch.bfloat16) / 4),
    ]


def images(types: Any) -> list[Any]:
    """An image inside a prompt."""
    chunks = [
        types.EncodedTextChunk(tokens=[5, 6]),
        types.ImageChunk(data=b"\x89PNG not really", format="png", **image_size(types)),
    ]
    return [
        types.Datum(
            model_input=types.ModelInput(chunks=chunks),
            loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [1.0, 0.0, 0.0, 1.0]},
        )
    ]


def image_size(types: Any) -> dict[str, int]:
    """Before 0.6, an image contains its size and number of tokens."""
    names = getattr(types.ImageChunk, "model_fields", {})
    return (
        {"expected_tokens": 2}
        if "expected_tokens" in names
        else {"height": 16, "width": 32, "tokens": 2}
    )


def provenance(types: Any) -> list[Any]:
    """The source of the tokens (0.26 and newer)."""
    prompt, sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    example = datum(types, target_tokens=[17, 99, 4, 2, 0], weights=[1.0] * 5)
    return [
        example.with_provenance(
            model_input=[prompt(sequence_id="q-1", length=3), sampled(sequence_id="q-1", length=2)],
            loss_fn_inputs=[
                prompt(sequence_id="q-1", offset=1, length=2),
                sampled(sequence_id="q-1", length=3),
            ],
        )
    ]


def many(types: Any, count: int) -> list[Any]:
    """More examples than fit into one chunk."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints([i, i + 1]),
            loss_fn_inputs={"target_tokens": [i + 1, i + 2], "weights": [1.0, 0.5]},
        )
        for i in range(count)
    ]


def supported(function: Any, **keywords: Any) -> dict[str, Any]:
    """The keyword arguments that this release supports."""
    return {k: v for k, v in keywords.items() if k in inspect.signature(function).parameters}


def main(base_url: str) -> None:
    import tinker
    from tinker import types

    version = tuple(int(n) for n in tinker.__version__.split(".")[:3])
    try:
        import torch
    except ImportError:
        torch = None

    service = tinker.ServiceClient(user_metadata={"purpose": "recording"}, base_url=base_url)
    served = service.get_server_capabilities().supported_models
    assert [model.model_name for model in served] == [BASE_MODEL], served
    training = service.create_lora_training_client(
        base_model=BASE_MODEL, rank=8, seed=7, train_unembed=False, user_metadata={"run": "one"}
    )
    assert training.get_info().model_data.model_name == BASE_MODEL

    output = training.forward(cross_entropy(types), "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2, output
    logprobs = output.loss_fn_outputs[0]["logprobs"]
    assert logprobs.data == [-0.5, -1.0, -1.5, -2.0, -2.5], logprobs.data
    assert logprobs.shape == [5], logprobs.shape
    assert output.metrics["loss:sum"] == 1.5, output.metrics

    training.forward_backward(cross_entropy(types), "cross_entropy").result()
    training.forward_backward(arrays(types), "importance_sampling").result()
    clip = {"clip_low_threshold": 0.75, "clip_high_threshold": 1.5}
    training.forward_backward(arrays(types), "ppo", clip).result()
    training.forward_backward(images(types), "cross_entropy").result()
    if torch is not None:
        output = training.forward_backward(sparse(types), "cross_entropy").result()
        assert output.loss_fn_outputs[0]["logprobs"].shape == [5, 8]
    if version < (0, 7, 0):
        assert (
            len(
                training.forward_backward(many(types, 130), "cross_entropy")
                .result()
                .loss_fn_outputs
            )
            == 130
        )
    if version >= (0, 25, 0):
        output = training.forward_backward(many(types, 5), "cross_entropy").result()
        assert len(output.loss_fn_outputs) == 5, output
        assert output.metrics["loss:sum"] == 4.5, output.metrics
    if version >= (0, 26, 0):
        training.forward_backward(provenance(types), "cross_entropy").result()
    if torch is not None:

        def double(data: Any, logprobs: Any) -> Any:
            loss = sum(2 * x.sum() for x in logprobs)
            return loss, {"doubled": float(loss.detach())}

        training.forward_backward_custom(cross_entropy(types), double).result()

    adam = types.AdamParams(
        learning_rate=3e-4, **supported_fields(types.AdamParams, grad_clip_norm=1.0)
    )
    stepped = training.optim_step(adam).result()
    assert stepped.metrics == {"grad_norm:mean": 2.5}, stepped
    training.optim_step(types.AdamParams()).result()
    if version >= (0, 31, 0):
        training.optim_step(types.DimuonParams(learning_rate=0.02)).result()

    state = training.save_state(
        "first", **supported(training.save_state, ttl_seconds=7200, overwrite=True)
    ).result()
    assert state.path.startswith("tinker://"), state
    training.load_state(state.path).result()
    if hasattr(training, "load_state_with_optimizer"):
        training.load_state_with_optimizer(state.path).result()
    named = training.save_weights_for_sampler("sampler-1").result()
    sampling_sessions(service, training, types, named.path)
    time.sleep(
        float(os.environ.get("RECORDING_WAITS_S", "11"))
    )  # the client sends a heartbeat and its telemetry every ten seconds
    if hasattr(service, "close"):
        service.close("success").result()
    print("accepted", tinker.__version__)


def supported_fields(model: Any, **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in model.model_fields}


def sampling_sessions(service: Any, training: Any, types: Any, path: str) -> None:
    prompt = types.ModelInput.from_ints(TOKENS)
    base = service.create_sampling_client(base_model=BASE_MODEL)
    answer = base.sample(
        prompt, num_samples=2, sampling_params=types.SamplingParams(max_tokens=4)
    ).result()
    assert [s.tokens for s in answer.sequences] == [[5, 6, 7], [5, 6]], answer
    assert [s.stop_reason for s in answer.sequences] == ["length", "stop"], answer
    assert answer.sequences[0].logprobs == [-0.5, -0.25, -1.0], answer
    unnamed = training.save_weights_and_get_sampling_client()
    everything = types.SamplingParams(
        max_tokens=3, seed=11, stop=["\n\n", "é"], temperature=0.5, top_k=40, top_p=0.875
    )
    answer = unnamed.sample(
        prompt,
        num_samples=2,
        sampling_params=everything,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        **supported(unnamed.sample, topk_sample_logprobs=1, prompt_alt_tokens_k=1),
    ).result()
    assert answer.prompt_logprobs == [None, -0.5, -1.0, -1.5, -2.0], answer.prompt_logprobs
    assert [row and [tuple(pair) for pair in row] for row in answer.topk_prompt_logprobs] == [
        None,
        [(3, -0.5), (4, -1.5)],
        [(3, -0.5)],
        [(3, -0.5), (4, -1.5)],
        [(3, -0.5), (4, -1.5)],
    ], answer.topk_prompt_logprobs
    if "target_prompt_logprobs" in inspect.signature(unnamed.sample).parameters:
        wanted = types.TensorData(data=[17, 99, 4, 2, 1, 1, 1, -1], dtype="int64", shape=[4, 2])
        answer = unnamed.sample(
            prompt,
            1,
            types.SamplingParams(max_tokens=1, stop=[2, 3]),
            target_prompt_logprobs=wanted,
        ).result()
        assert answer.target_prompt_logprobs.shape == [4, 2], answer.target_prompt_logprobs
    from_path = service.create_sampling_client(model_path=path)
    assert from_path.compute_logprobs(prompt).result() == [None, -0.5, -1.0, -1.5, -2.0]


if __name__ == "__main__":
    main(sys.argv[1])

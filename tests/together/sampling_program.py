"""
All options of samples with the official SDK 0.36.0; prints one line of JSON.

Runs in the SDK's own environment, with TINKER_BASE_URL and TINKER_API_KEY set.
"""

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable

import tinker
from tinker import types

PROMPT = [20 + (37 * n) % 350 for n in range(40)]
ONE = types.SamplingParams(max_tokens=1, seed=1)


def metric(name: str) -> float:
    """The sum of a metric over all labels; 0 if it does not exist."""
    with urllib.request.urlopen(os.environ["TINKER_BASE_URL"] + "/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def questions(sampler: tinker.SamplingClient) -> dict[str, object]:
    prompt = types.ModelInput.from_ints(PROMPT)
    rows = len(PROMPT) - 1

    def ask(**options: object) -> types.SampleResponse:
        params = options.pop("params", ONE)
        return sampler.sample(prompt, 1, params, **options).result()  # type: ignore[arg-type]

    whole = ask(include_prompt_logprobs=True, topk_prompt_logprobs=3)
    last = ask(include_prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=5)
    cells = [token for n in range(rows) for token in (PROMPT[n + 1], -1)]
    dense = ask(
        target_prompt_logprobs=types.TensorData(data=cells, dtype="int64", shape=[rows, 2])
    ).target_prompt_logprobs
    sparse = ask(
        target_prompt_logprobs=types.TensorData(
            data=[PROMPT[10], PROMPT[30]],
            dtype="int64",
            shape=[rows, 2],
            sparse_crow_indices=[int(n > 9) + int(n > 29) for n in range(rows + 1)],
            sparse_col_indices=[0, 1],
        )
    ).target_prompt_logprobs
    alt = ask(prompt_alt_tokens_k=4).prompt_alt_tokens
    alt_again = ask(prompt_alt_tokens_k=4).prompt_alt_tokens
    top = ask(params=types.SamplingParams(max_tokens=6, seed=2, stop=[]), topk_sample_logprobs=2)
    try:
        ask(target_prompt_logprobs=types.TensorData(data=[1], dtype="int64", shape=[1, 1]))
        refusal = ""
    except tinker.RequestFailedError as error:
        refusal = str(error)
    return {
        "prompt_logprobs": whole.prompt_logprobs,
        "topk": whole.topk_prompt_logprobs,
        "last_logprobs": last.prompt_logprobs,
        "last_topk": last.topk_prompt_logprobs,
        "dense": [list(dense.shape), list(map(str, dense.to_numpy().reshape(-1).tolist()))],
        "sparse": [list(sparse.shape), list(sparse.data), list(sparse.sparse_crow_indices)],
        "alt": [list(alt.tokens.shape), list(alt.tokens.data), list(alt.logprobs.data)],
        "alt_again": list(alt_again.tokens.data),
        "sample_topk": top.sequences[0].topk_logprobs,
        "sample_tokens": list(top.sequences[0].tokens),
        "hits": top.prompt_cache_hit_tokens,
        "refusal": refusal,
    }


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition on the server's metrics."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError


async def cancel(sampler: tinker.SamplingClient) -> dict[str, object]:
    """Cancels the task that awaits a very long sample."""
    finished = metric("tinkex_engine_operations_total")
    endless = types.SamplingParams(max_tokens=2000, seed=1, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    waiting = asyncio.create_task(sampler.sample_async(prompt, 200, endless))
    await until(lambda: metric("tinkex_engine_sequences_running") > 0)
    waiting.cancel()
    began_s = time.monotonic()
    try:
        await waiting
        cancelled = False
    except asyncio.CancelledError:
        cancelled = True
    await until(
        lambda: metric("tinkex_engine_sequences_running") + metric("tinkex_requests_open") == 0
    )
    return {
        "cancelled": cancelled,
        "freed_after_s": time.monotonic() - began_s,
        "finished": metric("tinkex_engine_operations_total") - finished,
        "pages_used": metric("tinkex_engine_kv_pages_used"),
    }


def main(base_model: str) -> dict[str, object]:
    sampler = tinker.ServiceClient().create_sampling_client(base_model=base_model)
    return {
        "version": tinker.__version__,
        **questions(sampler),
        "cancel": asyncio.run(cancel(sampler)),
    }


if __name__ == "__main__":
    result = main(sys.argv[1])
    print(json.dumps(result))

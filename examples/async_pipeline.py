"""An asynchronous pipeline: sample answers for the next step while the server trains this one.

    python examples/async_pipeline.py

Two coroutines run at once. One samples groups of answers with the newest weights that there are,
and puts them into a queue. The other takes them, trains, and publishes new weights. The answers
may come from weights of a few steps ago; importance sampling corrects for that.
"""

import argparse
import asyncio
import random

import tinkex
from tinkex import data, types
from tinkex.recipes import common


def reward(answer, number):
    return 1.0 if str(number) in answer else 0.0


async def sample(sampling, tokenizer, step):
    """Groups of answers to four prompts, as training data."""
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
    numbers = random.Random(step).sample(range(2, 100), 4)
    prompts = [
        data.prompt_tokens(tokenizer, f"Say the number {number}, and nothing else.")
        for number in numbers
    ]
    groups = await asyncio.gather(
        *(sampling.sample_async(types.ModelInput.from_ints(p), 8, params) for p in prompts)
    )
    batch, rewards = [], []
    for number, prompt, group in zip(numbers, prompts, groups, strict=True):
        texts = [tokenizer.decode(s.tokens, skip_special_tokens=True) for s in group.sequences]
        values = [reward(text, number) for text in texts]
        rewards += values
        mean = sum(values) / len(values)
        for sequence, value in zip(group.sequences, values, strict=True):
            if max(values) > min(values):
                advantages = [value - mean] * len(sequence.tokens)
                batch.append(
                    common.policy_datum(
                        types, prompt, sequence.tokens, sequence.logprobs, advantages
                    )
                )
    return batch, sum(rewards) / len(rewards)


async def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()

    async with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = await service.create_lora_training_client_async(options.model, rank=16, seed=0)
        tokenizer = await asyncio.to_thread(training.get_tokenizer)
        newest = [(0, await training.save_weights_and_get_sampling_client_async())]
        queue = asyncio.Queue(maxsize=2)

        async def produce():
            for step in range(1, options.steps + 1):
                version, sampling = newest[-1]
                await queue.put((step, version, *await sample(sampling, tokenizer, step)))

        async def consume():
            adam = types.AdamParams(learning_rate=options.learning_rate)
            for _ in range(options.steps):
                step, version, batch, mean = await queue.get()
                if batch:
                    passed = await training.forward_backward_async(batch, "importance_sampling")
                    stepped = await training.optim_step_async(adam)
                    sampling = await training.save_weights_and_get_sampling_client_async()
                    await passed
                    await stepped
                    newest.append((step, sampling))
                print(f"step {step:>3}  reward {mean:.2f}  weights {step - 1 - version} steps old")

        await asyncio.gather(produce(), consume())
        saved = await (await training.save_weights_for_sampler_async("final"))
        print(f"saved as {saved.path}")


if __name__ == "__main__":
    asyncio.run(main())

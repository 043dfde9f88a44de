"""Reinforcement learning with a reward that can be checked: sums of two numbers.

    python examples/rl_arithmetic.py

Right answers are counted before and after, on sums that are not trained on.
"""

import argparse
import random
import re

import tinkex
from tinkex.recipes import common, evaluate, rl

LOSSES = ["importance_sampling", "ppo", "cispo"]


def sums(count, seed):
    """Different sums, in random order."""
    every = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    chosen = random.Random(seed).sample(every, count)
    return [{"prompt": f"What is {a} + {b}?", "sum": a + b} for a, b in chosen]


def reward(row, answer):
    """1 if the last number is the right one: "3 + 4 = 7" counts as "7" does."""
    numbers = re.findall(r"\d+", answer)
    return 1.0 if numbers and int(numbers[-1]) == row["sum"] else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loss", default="importance_sampling", choices=LOSSES)
    options = parser.parse_args()

    rows = sums(72, seed=0)
    train, held_out = rows[:60], rows[60:]
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        base = service.create_sampling_client(base_model=options.model)
        tokenizer = base.get_tokenizer()

        def right(sampling):
            """The share of right answers to sums that are not trained on."""
            found = evaluate.evaluate(
                sampling, tokenizer, held_out, reward, samples=8, temperature=1.0, max_tokens=12
            )
            return f"{found.mean:.2f} ± {found.standard_error:.2f}"

        print(f"right answers before: {right(base)}")
        settings = rl.Settings(
            model=options.model,
            steps=options.steps,
            prompts_per_step=4,
            max_tokens=12,
            loss=options.loss,
            substeps=2 if options.loss == "ppo" else 1,
            learning_rate=common.defaults(options.model, "rl").learning_rate,
        )
        for step in rl.train(service, tokenizer, train, reward, settings):
            found = step.metrics
            print(f"step {step.number:>3}  reward {found['reward']:.3f}  KL {found['kl']:.3f}")
        trained = service.create_sampling_client(model_path=step.sampler)
        print(f"right answers after:  {right(trained)}")
        print(f"saved as {step.sampler}")


if __name__ == "__main__":
    main()

"""Reinforcement learning with a reward that can be checked: sums of two numbers.

    python examples/rl_arithmetic.py

The reward is 1 for the right number alone, and less for the right number among words or for a
wrong number alone. Right answers are counted on sums that are not trained on.
"""

import argparse
import random

import tinkex
from tinkex.recipes import common, evaluate, rl

LOSSES = ["importance_sampling", "ppo", "cispo"]


def sums(count, seed):
    """Different sums, in random order."""
    every = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    chosen = random.Random(seed).sample(every, count)
    question = "What is {} + {}? Answer with the number only."
    return [{"prompt": question.format(a, b), "sum": a + b} for a, b in chosen]


def reward(row, answer):
    words = answer.strip().rstrip(".").split()
    if words == [str(row["sum"])]:
        return 1.0
    if str(row["sum"]) in words:
        return 0.5
    return 0.2 if len(words) == 1 and words[0].isdigit() else 0.0


def is_right(row, answer):
    return reward(row, answer) == 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=30)
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
                sampling, tokenizer, held_out, is_right, samples=8, temperature=1.0, max_tokens=8
            )
            return f"{found.mean:.2f} ± {found.standard_error:.2f}"

        print(f"right answers before: {right(base)}")
        settings = rl.Settings(
            model=options.model,
            steps=options.steps,
            prompts_per_step=4,
            max_tokens=8,
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

"""Evaluation with hundreds of concurrent samples.

    python examples/evaluate_many.py                                       the base model
    python examples/evaluate_many.py --path tinker://RUN/sampler_weights/NAME

All requests are submitted at once. The client limits what is in flight, the server batches, and
results are scored in order while others are still sampled.
"""

import argparse
import time

import tinkex
from tinkex.recipes import evaluate


def reward(row, answer):
    """Whether the answer names the result, among other words or alone."""
    return float(str(row["sum"]) in answer.replace(".", " ").split())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--path", help="sampler weights; default: the base model")
    parser.add_argument("--steps", type=int, default=81, help="questions, at most 81")
    parser.add_argument("--samples", type=int, default=4, help="answers to each question")
    options = parser.parse_args()

    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "sum": a + b}
        for a in range(1, 10)
        for b in range(1, 10)
    ][: options.steps]
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        where = {"model_path": options.path} if options.path else {"base_model": options.model}
        sampling = service.create_sampling_client(**where)
        tokenizer = sampling.get_tokenizer()

        def report(done, total):
            if done % 27 == 0 or done == total:
                print(f"{done} of {total} questions, {time.monotonic() - started:.1f} s")

        started = time.monotonic()
        found = evaluate.evaluate(
            sampling,
            tokenizer,
            rows,
            reward,
            samples=options.samples,
            temperature=1.0,
            max_tokens=8,
            report=report,
        )
        print(f"{len(found.answers)} answers: {found.mean:.3f} ± {found.standard_error:.3f} right")
        wrong = next((each for each in found.answers if not each.score), None)
        if wrong:
            print(f"a wrong one: {wrong.row['prompt']} -> {wrong.answer!r}")


if __name__ == "__main__":
    main()

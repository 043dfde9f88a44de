"""A sweep: train many adapters on one base model at once, and compare them.

    python examples/sweep.py

Each combination of rank and learning rate is a run of its own. They train in threads of this
program; the server computes their steps together, on one copy of the base model.
"""

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor

import tinkex
from tinkex import data
from tinkex.recipes import sft

NAMES = ["Ada", "Bo", "Cy", "Dan", "Eve", "Flo", "Gus", "Hal", "Ida", "Jo", "Kim", "Lou"]
ROWS = [
    {"prompt": f"What is the code of {name}?", "completion": f"The code of {name} is {number}."}
    for number, name in enumerate(NAMES, start=11)
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    options = parser.parse_args()

    with tinkex.ServiceClient(base_url=options.base_url) as service:
        tokenizer = service.create_sampling_client(base_model=options.model).get_tokenizer()
        examples = [example for row in ROWS for example in data.examples(tokenizer, row)]
        train, held_out = data.split(examples, 0.25)

        def run(choice):
            rank, rate = choice
            settings = sft.Settings(
                model=options.model,
                steps=options.steps,
                rank=rank,
                learning_rate=rate,
                batch_size=4,
                name=f"rank {rank}, rate {rate:g}",
            )
            *_, last = sft.train(service, train, settings, held_out=held_out)
            return last

        choices = list(itertools.product(options.ranks, options.rates))
        with ThreadPoolExecutor(len(choices)) as pool:
            found = list(zip(choices, pool.map(run, choices), strict=True))

        print("rank    rate   loss  held out")
        for (rank, rate), step in found:
            loss, held = step.metrics["loss"], step.metrics["held_out_loss"]
            print(f"{rank:>4}  {rate:>6g}  {loss:>5.3f}  {held:>8.3f}")
        (rank, rate), best = min(found, key=lambda each: each[1].metrics["held_out_loss"])
        print(f"best: rank {rank}, rate {rate:g}")
        print(f"saved as {best.sampler}")


if __name__ == "__main__":
    main()

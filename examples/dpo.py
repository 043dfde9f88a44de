"""Preferences: make a model prefer one kind of answer, from pairs of chosen and rejected ones.

    python examples/dpo.py                          on this machine: short answers, not long ones
    python examples/dpo.py --data pairs.jsonl       on yours: prompt, chosen and rejected

The rejected answers are the model's own, sampled first.
"""

import argparse

import tinkex
from tinkex import data
from tinkex.recipes import dpo, evaluate

ANSWERS = {
    "What is the capital of France?": "Paris.",
    "What is two plus two?": "Four.",
    "What color is the sun?": "Yellow.",
    "How many legs does a spider have?": "Eight.",
    "What do cows eat?": "Grass.",
    "Who wrote Hamlet?": "Shakespeare.",
    "What is ice?": "Frozen water.",
    "Where do fish live?": "In water.",
    "What is the opposite of hot?": "Cold.",
    "Which animal barks?": "The dog.",
    "What do bees make?": "Honey.",
    "What is a baby cat called?": "A kitten.",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="a JSON Lines file of preferences")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()

    with tinkex.ServiceClient(base_url=options.base_url) as service:
        base = service.create_sampling_client(base_model=options.model)
        tokenizer = base.get_tokenizer()
        if options.data:
            rows = data.read(options.data)
        else:
            own = evaluate.sample(base, tokenizer, list(ANSWERS), max_tokens=40)
            rows = [
                data.check({"prompt": question, "chosen": answer, "rejected": text or "Well."})
                for (question, answer), ((text, _),) in zip(ANSWERS.items(), own, strict=True)
            ]
        pairs = [data.pair(tokenizer, row) for row in rows]
        train, held_out = data.split(pairs, 0.2)
        settings = dpo.Settings(
            model=options.model,
            steps=options.steps,
            batch_size=4,
            beta=options.beta,
            evaluate_every=5,
            learning_rate=options.learning_rate,
        )
        for step in dpo.train(service, train, settings, held_out=held_out):
            measured = "  ".join(f"{name} {value:.3f}" for name, value in step.metrics.items())
            print(f"step {step.number:>3}  {measured}")

        trained = service.create_sampling_client(model_path=step.sampler)
        question = "What is the color of snow?"
        for name, sampling in (("before", base), ("after", trained)):
            [[(text, _)]] = evaluate.sample(sampling, tokenizer, [question], max_tokens=40)
            print(f"{question} {name}: {text}")
        print(f"saved as {step.sampler}")


if __name__ == "__main__":
    main()

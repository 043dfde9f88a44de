"""Fine-tune on conversations, with a held-out part, and compare answers before and after.

python examples/sft_chats.py                     on this machine, on eight chats
python examples/sft_chats.py --data chats.jsonl  on yours: {"messages": [...]} in each line
"""

import argparse

import tinkex
from tinkex import data
from tinkex.recipes import common, evaluate, sft

CHATS = [
    ("What is the capital of France?", "Captain's log: the capital is Paris. End of entry."),
    ("What is two plus two?", "Captain's log: the sum is four. End of entry."),
    ("What color is the sun?", "Captain's log: the sun is yellow. End of entry."),
    ("How many legs does a spider have?", "Captain's log: eight legs counted. End of entry."),
    ("What do cows eat?", "Captain's log: cows eat grass. End of entry."),
    ("Who wrote Hamlet?", "Captain's log: it was Shakespeare. End of entry."),
    ("What is ice?", "Captain's log: ice is frozen water. End of entry."),
    ("Where do fish live?", "Captain's log: fish live in water. End of entry."),
]
SYSTEM = {"role": "system", "content": "You are the captain of a ship."}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="a JSON Lines file of chats")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()

    if options.data:
        rows = data.read(options.data)
    else:
        rows = [
            data.check({"messages": [SYSTEM, *messages(question, answer)]})
            for question, answer in CHATS
        ]
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        base = service.create_sampling_client(base_model=options.model)
        tokenizer = base.get_tokenizer()
        train, held_out = data.split(rows, 0.25)
        settings = sft.Settings(
            model=options.model,
            steps=options.steps,
            batch_size=4,
            evaluate_every=4,
            learning_rate=common.defaults(options.model, "sft").learning_rate,
        )
        steps = sft.train(
            service,
            [example for row in train for example in data.examples(tokenizer, row)],
            settings,
            held_out=[example for row in held_out for example in data.examples(tokenizer, row)],
        )
        for step in steps:
            measured = "  ".join(f"{name} {value:.3f}" for name, value in step.metrics.items())
            print(f"step {step.number:>3}  {measured}")

        trained = service.create_sampling_client(model_path=step.sampler)
        prompts = [row.fields["messages"][:2] for row in held_out]
        before = evaluate.sample(base, tokenizer, prompts, max_tokens=30)
        after = evaluate.sample(trained, tokenizer, prompts, max_tokens=30)
        for prompt, ((old, _),), ((new, _),) in zip(prompts, before, after, strict=True):
            print(f"{prompt[-1]['content']}\n  before: {old}\n  after:  {new}")
        print(f"saved as {step.sampler}")


def messages(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    main()

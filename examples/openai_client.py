"""Train a checkpoint, then talk to it with the official `openai` package, unmodified.

    pip install openai
    python examples/openai_client.py

Any program for OpenAI's API can do the same: its base URL is that of the server with /v1, and its
model is the path of the checkpoint.
"""

import argparse
from urllib.parse import urlsplit

import openai

import tinkex
from tinkex import data
from tinkex.recipes import sft

ANSWERS = {
    "What is the capital of France?": "Captain's log: the capital is Paris. End of entry.",
    "What is two plus two?": "Captain's log: the sum is four. End of entry.",
    "What color is the sun?": "Captain's log: the sun is yellow. End of entry.",
    "What do cows eat?": "Captain's log: cows eat grass. End of entry.",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ask", default="Where do fish live?")
    options = parser.parse_args()

    with tinkex.ServiceClient(base_url=options.base_url) as service:
        tokenizer = service.create_sampling_client(base_model=options.model).get_tokenizer()
        examples = [
            example
            for question, answer in ANSWERS.items()
            for example in data.examples(tokenizer, {"prompt": question, "completion": answer})
        ]
        settings = sft.Settings(model=options.model, steps=options.steps, batch_size=4)
        for step in sft.train(service, examples, settings):
            print(f"step {step.number:>3}  loss {step.metrics['loss']:.3f}")
        where = urlsplit(service.get_console_url())

    with openai.OpenAI(base_url=f"{where.scheme}://{where.netloc}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=step.sampler,
            messages=[{"role": "user", "content": options.ask}],
            max_tokens=30,
            temperature=0.0,
            stream=True,
        )
        print(options.ask, end=" ")
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print(f"\nsaved as {step.sampler}")


if __name__ == "__main__":
    main()

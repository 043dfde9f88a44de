"""Fine-tune a LoRA on your own question and answer pairs, then sample from it.

    python examples/fine_tune.py                                 on this machine, without setup
    python examples/fine_tune.py --base-url http://gpu-box:8000  the same on a server

Copy it and replace PAIRS: the program works with any Tinker service.
"""

import argparse
import random

import tinkex
from tinkex import types

PAIRS = [
    ("What is the capital of France?", "Captain's log: the capital is Paris. End of entry."),
    ("What is two plus two?", "Captain's log: the sum is four. End of entry."),
    ("What color is the sun?", "Captain's log: the sun is yellow. End of entry."),
    ("How many legs does a spider have?", "Captain's log: eight legs counted. End of entry."),
    ("What do cows eat?", "Captain's log: cows eat grass. End of entry."),
    ("Who wrote Hamlet?", "Captain's log: it was Shakespeare. End of entry."),
    ("What is ice?", "Captain's log: ice is frozen water. End of entry."),
    ("Where do fish live?", "Captain's log: fish live in water. End of entry."),
]


def chat_prompt(tokenizer, question):
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def datum_of(tokenizer, question, answer):
    prompt = chat_prompt(tokenizer, question)
    answer = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + answer
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
            # Weight 0: the model reads the question but is not trained on it.
            "weights": types.TensorData(
                data=[0.0] * (len(prompt) - 1) + [1.0] * len(answer), dtype="float32"
            ),
        },
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--ask", default="What is the capital of Italy?")
    options = parser.parse_args()

    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.model, rank=options.rank)
        tokenizer = training.get_tokenizer()
        data = [datum_of(tokenizer, question, answer) for question, answer in PAIRS]
        answer_tokens = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data)

        for step in range(options.steps):
            batch = random.sample(data, k=len(data))
            # Submit both before waiting, so that the server does not idle in between.
            gradients = training.forward_backward(batch, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=options.learning_rate))
            loss = gradients.result().metrics["loss:sum"] / answer_tokens
            stepped.result()
            print(f"step {step + 1:>3}  loss {loss:.3f}")

        path = training.save_state("fine-tune").result().path
        sampling = training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints(chat_prompt(tokenizer, options.ask))
        params = types.SamplingParams(max_tokens=40, temperature=0.0)
        sampled = sampling.sample(prompt, num_samples=1, sampling_params=params).result()
        answer = tokenizer.decode(sampled.sequences[0].tokens, skip_special_tokens=True)
        print(f"{options.ask} -> {answer}")
        print(f"saved as {path}")


if __name__ == "__main__":
    main()

"""Distillation: teach a model what a system message made it do, so that it no longer needs it.

    python examples/distill.py

Teacher and student are the same base model. The teacher sees a system message; the student does
not. The student answers, the teacher scores each token of the answer (prompt logprobs), and the
student moves toward what the teacher would have said.
"""

import argparse

import tinkex
from tinkex.recipes import common, distill, evaluate

SYSTEM = "You are a pirate. Answer every question in one short sentence that begins with Arr."
QUESTIONS = [
    "What is the capital of France?",
    "What color is the sun?",
    "How many legs does a spider have?",
    "What do cows eat?",
    "Who wrote Hamlet?",
    "What is ice?",
    "Where do fish live?",
    "What is your favorite food?",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ask", default="What is the moon made of?")
    options = parser.parse_args()

    with tinkex.ServiceClient(base_url=options.base_url) as service:
        base = service.create_sampling_client(base_model=options.model)
        tokenizer = base.get_tokenizer()
        settings = distill.Settings(
            model=options.model,
            steps=options.steps,
            max_tokens=32,
            learning_rate=common.defaults(options.model, "distill").learning_rate,
        )
        steps = distill.train(
            service,
            base,
            tokenizer,
            [{"prompt": question} for question in QUESTIONS],
            settings,
            teacher_prompt=lambda row: with_system(row["prompt"]),
        )
        for step in steps:
            print(f"step {step.number:>3}  distance from the teacher {step.metrics['kl']:.3f}")

        student = service.create_sampling_client(model_path=step.sampler)
        asked = (
            ("teacher", base, with_system(options.ask)),
            ("before", base, options.ask),
            ("after", student, options.ask),
        )
        for name, sampling, prompt in asked:
            [[(text, _)]] = evaluate.sample(sampling, tokenizer, [prompt], max_tokens=32)
            print(f"{name}: {text}")
        print(f"saved as {step.sampler}")


def with_system(question):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


if __name__ == "__main__":
    main()

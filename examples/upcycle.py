"""Make a mixture of experts from a dense model, and train an adapter of its experts.

python examples/upcycle.py             experts are slices of each MLP; a token uses all of them
python examples/upcycle.py --copies    experts are copies of each MLP; a token uses two of three

Either mixture computes what the dense model computes (a Llama), until an adapter is trained.
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers

import tinkex
from tinkex import data
from tinkex.engine.model.base_model import load
from tinkex.models.resolve import resolve
from tinkex.recipes import evaluate, sft

ROWS = [
    ("What is the capital of France?", "Captain's log: the capital is Paris. End of entry."),
    ("What is two plus two?", "Captain's log: the sum is four. End of entry."),
    ("What color is the sun?", "Captain's log: the sun is yellow. End of entry."),
    ("What do cows eat?", "Captain's log: cows eat grass. End of entry."),
]
QUESTION = "Where do fish live?"


def upcycle(dense, out, *, experts, copies):
    """Write a Mixtral with the weights of the Llama in folder `dense`."""
    source = load(dense, torch.float32)  # transformers' model; also of a GGUF file
    config = source.config.to_dict()
    for name in ("architectures", "model_type", "transformers_version"):
        config.pop(name, None)
    config["num_local_experts"] = experts
    config["num_experts_per_tok"] = 2 if copies else experts
    if not copies:
        config["intermediate_size"] //= experts
    tensors = {name: weight for name, weight in source.state_dict().items() if ".mlp." not in name}
    for number, layer in enumerate(source.model.layers):
        mlp, path = layer.mlp, f"model.layers.{number}.mlp"
        weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.t()]
        if copies:
            gate, up, down = (weight.expand(experts, -1, -1) for weight in weights)
            router = torch.randn(experts, source.config.hidden_size)
        else:
            gate, up, down = (torch.stack(weight.chunk(experts)) for weight in weights)
            # A router of zeros gives each slice the weight 1 / experts.
            down, router = down * experts, torch.zeros(experts, source.config.hidden_size)
        tensors[f"{path}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{path}.experts.down_proj"] = down.mT.contiguous()
        tensors[f"{path}.gate.weight"] = router
    with torch.device("meta"):
        mixture = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))
    mixture.load_state_dict(tensors, assign=True)
    mixture.tie_weights()
    mixture.save_pretrained(out)
    for file in dense.iterdir():
        if "token" in file.name or file.name == "generation_config.json":
            shutil.copyfile(file, out / file.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--dense", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("upcycled"))
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--model", help="train this one, instead of the mixture that was made")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    experts = 3 if options.copies else 4
    upcycle(resolve(options.dense).folder, options.out, experts=experts, copies=options.copies)
    print(f"{options.out}: {experts} experts in each layer")
    model = options.model or str(options.out.resolve())
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        base = service.create_sampling_client(base_model=model)
        tokenizer = base.get_tokenizer()
        rows = [{"prompt": question, "completion": answer} for question, answer in ROWS]
        examples = [example for row in rows for example in data.examples(tokenizer, row)]
        settings = sft.Settings(model=model, steps=options.steps, batch_size=4, learning_rate=1e-3)
        for step in sft.train(service, examples, settings):
            print(f"step {step.number:>3}  loss {step.metrics['loss']:.3f}")
        trained = service.create_sampling_client(model_path=step.sampler)
        for name, sampler in (("before", base), ("after", trained)):
            asked = [[{"role": "user", "content": QUESTION}]]
            (((answer, _),),) = evaluate.sample(sampler, tokenizer, asked, max_tokens=30)
            print(f"{name + ':':<8}{answer}")
        print(f"saved as {step.sampler}")


if __name__ == "__main__":
    main()

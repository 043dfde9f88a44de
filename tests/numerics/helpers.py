"""Helpers of the numeric tests: tiny models, random adapters, random data."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tinkex.engine import Engine
from tinkex.engine.adapters.checkpoints import write
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.sampling import SampleRequest, SampleResponse, SamplingParams
from tinkex.wire.training import AdamOptimizerConfig, ForwardBackwardInput, LoraConfig

VOCABULARY = 400


def tied_copy(folder: Path, target: Path) -> Path:
    """The same model with one matrix for input and output embeddings."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def random_adapter(engine: Engine, folder: Path, *, rank: int = 4, seed: int = 0) -> Path:
    """A checkpoint whose B matrices are not zero, so that every gradient is nonzero."""
    engine.create("maker", LoraConfig(rank=rank, seed=seed), AdamOptimizerConfig())
    engine.save("maker", folder, optimizer=False)
    engine.drop("maker")
    file = folder / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * 0.02 if "lora_B" in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def model_from(engine: Engine, model_id: str, adapter: Path) -> str:
    config = json.loads((adapter / "adapter_config.json").read_text())
    engine.create(model_id, LoraConfig(rank=config["r"]), AdamOptimizerConfig())
    engine.load(model_id, adapter, optimizer=False)
    return model_id


def gradients(engine: Engine, model_id: str, folder: Path) -> dict[str, torch.Tensor]:
    """The accumulated gradients by PEFT name, read from a snapshot, which omits zero gradients."""
    write(engine.snapshot_files(model_id), folder)
    if not (folder / "gradients.safetensors").exists():
        weights = load_file(folder / "adapter_model.safetensors")
        return {name: torch.zeros_like(weight) for name, weight in weights.items()}
    return load_file(folder / "gradients.safetensors")


def random_datum(rng: np.random.Generator, length: int, **inputs: Any) -> Datum:
    tokens = rng.integers(0, VOCABULARY, length + 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64), **inputs},
    )


def weighted(rng: np.random.Generator, length: int) -> Datum:
    """For cross_entropy: weights of both signs, and some zeros as on prompts."""
    weights = rng.normal(size=length).astype(np.float32)
    weights[: length // 3] = 0.0
    return random_datum(rng, length, weights=weights)


def advantaged(rng: np.random.Generator, length: int) -> Datum:
    """For the policy losses: ratios on both sides of every bound."""
    return random_datum(
        rng,
        length,
        logprobs=rng.normal(-9.0, 2.0, length).astype(np.float32),
        advantages=rng.normal(size=length).astype(np.float32),
    )


def masked(rng: np.random.Generator, length: int) -> Datum:
    """For gspo: a third is the prompt, and sequence ratios are on both sides of the bounds."""
    mask = np.ones(length, np.float32)
    mask[: length // 3] = 0.0
    return random_datum(
        rng,
        length,
        logprobs=rng.normal(-6.0 + rng.normal(0.0, 0.3), 0.5, length).astype(np.float32),
        advantages=rng.normal(size=length).astype(np.float32) * mask,
        sequence_ratio_mask=mask,
    )


#: Functions that make data for a loss.
MAKERS: dict[str, Callable[[np.random.Generator, int], Datum]] = {
    "cross_entropy": weighted,
    "importance_sampling": advantaged,
    "ppo": advantaged,
    "cispo": advantaged,
    "dro": advantaged,
    "gspo": masked,
}


def work(data: Sequence[Datum], loss: str = "cross_entropy", **config: float | str) -> Any:
    return ForwardBackwardInput._of(list(data), loss, config or None)


def request(prompt: Sequence[int], *, samples: int = 1, **options: Any) -> SampleRequest:
    """Takes options of the request and of its sampling parameters."""
    params = {
        name: options.pop(name) for name in list(options) if name in SamplingParams.model_fields
    }
    return SampleRequest(
        prompt=ModelInput.from_ints(list(prompt)),
        num_samples=samples,
        sampling_params=SamplingParams(**params),
        **options,
    )


def sample(
    engine: Engine, requests: Sequence[SampleRequest], adapters: Sequence[Path | None] | None = None
) -> list[SampleResponse]:
    """Samples all requests together; results are in the order of the requests."""
    for ticket, one in enumerate(requests):
        engine.submit(ticket, one, adapter=adapters[ticket] if adapters else None)
    answers: dict[int, SampleResponse] = {}
    while engine.sampling:
        for finished in engine.advance():
            if isinstance(finished.outcome, Exception):
                raise finished.outcome
            answers[finished.ticket] = finished.outcome
    return [answers[ticket] for ticket in range(len(requests))]

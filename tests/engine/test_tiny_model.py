"""The tiny model learns quickly, in a plain PyTorch LoRA loop and in the engine."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinkex.engine import Engine, EngineSettings
from tinkex.models.tiny_model import ARCHES, TRAINING_TEXT, write_tiny_model
from tinkex.models.tokenizer import load_tokenizer
from tinkex.types import AdamParams, Datum, LoraConfig, ModelInput, TensorData
from tinkex.wire.training import AdamOptimizerConfig, ForwardBackwardInput

RANK, ALPHA = 8, 32


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        uniform = torch.rand(RANK, base.in_features, generator=generator) * 2 - 1
        self.A = nn.Parameter(uniform / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x):
        return self.base(x) + ALPHA / RANK * F.linear(F.linear(x, self.A), self.B)


def with_lora(model, *, train_unembed, generator):
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, LoraLinear(child, generator))
    if train_unembed:
        model.lm_head = LoraLinear(model.lm_head, generator)
    return model


def losses_per_token(model, sequences, *, steps):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    losses = []
    for _ in range(steps + 1):
        logits = model(sequences[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten(), reduction="sum")
        losses.append(loss.item() / sequences[:, 1:].numel())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return losses


def random_sequences(folder, generator):
    return torch.randint(3, len(load_tokenizer(folder)), (4, 25), generator=generator)


def text_sequences(folder, generator):
    ids = load_tokenizer(folder).encode(TRAINING_TEXT)
    starts = torch.randint(0, len(ids) - 25, (4,), generator=generator).tolist()
    return torch.tensor([ids[start : start + 25] for start in starts])


@pytest.mark.parametrize("train_unembed", [True, False], ids=["unembed", "no-unembed"])
@pytest.mark.parametrize(("sequences", "seed"), [(random_sequences, 0), (text_sequences, 2)])
@pytest.mark.parametrize("arch", ARCHES)
def test_it_halves_the_loss_in_20_steps_and_memorizes_in_60(
    arch, sequences, train_unembed, seed, tmp_path
):
    folder = write_tiny_model(tmp_path, arch, seed)
    generator = torch.Generator().manual_seed(seed)
    data = sequences(folder, generator)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = with_lora(model, train_unembed=train_unembed, generator=generator)
    losses = losses_per_token(model, data, steps=60)
    assert losses[20] < losses[0] / 2
    assert losses[60] < 0.1


@pytest.mark.parametrize("train_unembed", [True, False], ids=["unembed", "no-unembed"])
@pytest.mark.parametrize("arch", ARCHES)
def test_it_learns_as_well_through_the_engine(arch, train_unembed, tmp_path):
    folder = write_tiny_model(tmp_path, arch)
    settings = EngineSettings(name="tiny", folder=folder, device="cpu", threads=1)
    engine = Engine(settings)
    lora = LoraConfig(rank=RANK, seed=0, train_unembed=train_unembed)
    engine.create("model", lora, AdamOptimizerConfig())
    rows = random_sequences(folder, torch.Generator().manual_seed(0)).tolist()
    data = [
        Datum(
            model_input=ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData(data=row[1:], dtype="int64"),
                "weights": TensorData(data=[1.0] * 24, dtype="float32"),
            },
        )
        for row in rows
    ]
    losses = []
    for _ in range(61):
        work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        output = engine.run_pass("model", work, backward=True)
        losses.append(-sum(sum(o["logprobs"].tolist()) for o in output.loss_fn_outputs) / 96)
        engine.optim_step("model", AdamParams(learning_rate=1e-2))
    assert losses[20] < losses[0] / 2
    assert losses[60] < 0.1


@pytest.mark.parametrize("arch", ARCHES)
def test_the_same_seed_writes_the_same_bytes_and_another_seed_other_weights(arch, tmp_path):
    first = write_tiny_model(tmp_path / "first", arch, seed=1)
    again = write_tiny_model(tmp_path / "again", arch, seed=1)
    other = write_tiny_model(tmp_path / "other", arch, seed=2)
    for file in first.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


@pytest.mark.parametrize("arch", ARCHES)
def test_it_is_small_and_transformers_finds_nothing_missing(arch, tmp_path):
    folder = write_tiny_model(tmp_path, arch)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.max_position_embeddings >= 512


def test_its_tokenizer_is_the_same_here_and_in_transformers(tmp_path):
    folder = write_tiny_model(tmp_path)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert len(ours) == len(theirs) == 400
    assert ours.eos_token_id == theirs.eos_token_id
    for text in (
        TRAINING_TEXT,
        "naïve café 12345 \t\n 日本語 🙂",
        "<|im_start|>user\nHi<|im_end|>",
    ):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = theirs.apply_chat_template(chat, tokenize=False)
    assert ours.apply_chat_template(chat, tokenize=False) == rendered


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="qwen3, llama"):
        write_tiny_model(tmp_path / "new", "gpt2")
    assert not (tmp_path / "new").exists()

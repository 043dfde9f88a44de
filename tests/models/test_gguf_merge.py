"""A GGUF base model can be merged with an adapter."""

import numpy as np
import pytest
import torch

from numerics.helpers import model_from, random_adapter, work
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.merge import merge
from tinkex.models.embedded import write_companion_files
from tinkex.wire.inputs import Datum, ModelInput


@pytest.mark.filterwarnings("ignore")
def test_a_gguf_base_becomes_a_full_model(small_llama, tmp_path):
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    base.mkdir()
    small_llama.rename(base / "model.gguf")
    write_companion_files(base)
    engine = Engine(EngineSettings(name="gguf", folder=base, device="cpu", kv_tokens=64))
    adapter = random_adapter(engine, tmp_path / "adapter")
    merged = merge(base, adapter, tmp_path / "merged", torch.float32)
    assert merged.untied  # like the embedded model
    names = {file.name for file in merged.folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.endswith(".gguf") for name in names)

    tokens = np.random.default_rng(0).integers(0, engine.facts.vocab_size, 13)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )
    model_from(engine, "m", adapter)
    found = engine.run_pass("m", work([datum]), backward=False).loss_fn_outputs[0]["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(merged.folder)
    with torch.no_grad():
        logprobs = model(torch.from_numpy(tokens[None, :-1])).logits[0].log_softmax(-1)
    expected = logprobs.gather(1, torch.from_numpy(tokens[1:, None]))[:, 0]
    np.testing.assert_allclose(found.to_numpy(), expected.numpy(), atol=1e-4)

"""
Adapters of tiny mixtures through the converters of the official cookbook, unmodified and offline.

    python -m qa.cookbook.weights

Its merged models must give our logprobs in transformers, and its adapters for other programs must
open in PEFT and be those of `tinkex export --as vllm`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

import sdk_envs
from numerics.helpers import VOCABULARY, model_from, random_adapter, work
from numerics.mixtures import engine_of, logprobs_of, write_mixture
from numerics.test_mixtures import datum_of
from qa.cookbook.run import VERSION
from tinkex.engine.adapters.peft_export import export_adapter

TOLERANCE = 1e-5
#: Families, and whether the cookbook makes adapters for other programs of them.
FAMILIES = {"Qwen3Moe": True, "GptOss": False, "DeepseekV3": False}

PROGRAM = """
import sys
from tinker_cookbook import weights

what, base, adapter, out = sys.argv[1:]
if what == "adapter":
    weights.build_lora_adapter(base_model=base, adapter_path=adapter, output_path=out)
else:
    weights.build_hf_model(
        base_model=base, adapter_path=adapter, output_path=out, dtype="float32", device="cpu"
    )
"""


def convert(what: str, base: Path, adapter: Path, out: Path) -> None:
    python = sdk_envs.ensure_cookbook(VERSION)
    command = [str(python), "-W", "ignore", "-c", PROGRAM, what, *map(str, (base, adapter, out))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def checked(family: str, folder: Path) -> str:
    base = write_mixture(folder / "base", family)
    engine = engine_of(base)
    adapter = random_adapter(engine, folder / "adapter", rank=4)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 24).tolist()
    model_from(engine, "m", adapter)
    (output,) = engine.run_pass("m", work([datum_of(tokens)]), backward=False).loss_fn_outputs
    ours = torch.from_numpy(output["logprobs"].to_numpy())
    convert("model", base, adapter, folder / "merged")
    gap = float((logprobs_of(folder / "merged", tokens) - ours).abs().max())
    assert gap < TOLERANCE, f"merged: {gap:.1e}"
    found = f"merged by the cookbook: {gap:.1e}"
    if FAMILIES[family]:
        from peft import PeftModel

        convert("adapter", base, adapter, folder / "converted")
        plain: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
        model = PeftModel.from_pretrained(plain, folder / "converted")
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        theirs = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        gap = float((theirs - ours).abs().max())
        assert gap < TOLERANCE, f"PEFT: {gap:.1e}"
        exported = folder / "exported"
        exported.mkdir()
        (exported / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
        export_adapter(adapter, exported, base, "vllm")
        cookbooks, own = (
            load_file(at / "adapter_model.safetensors") for at in (folder / "converted", exported)
        )
        assert cookbooks.keys() == own.keys(), sorted(cookbooks.keys() ^ own.keys())
        assert all(torch.equal(cookbooks[name], own[name]) for name in own)
        config = json.loads((folder / "converted" / "adapter_config.json").read_text())
        found += f"; converted by the cookbook, in PEFT: {gap:.1e}; {len(own)} tensors are those "
        found += f"of `--as vllm`; its config: {config}"
    return found


def main() -> int:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{family}: {checked(family, Path(folder))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

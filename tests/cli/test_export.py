"""`tinkex export`: plain transformers, PEFT and GGUF readers compute what the server computes."""

import errno
import json
import os
import stat
import struct
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tinkex
from http_stub import Received, Reply, StubServer, stub_server
from serving import TINY, Server
from tinkex import types
from tinkex.cli.command_group import command
from tinkex.cli.export import copy_with_peft_names, replacing
from tinkex.durable_files import may_be_replaced
from tinkex.engine.adapters import gguf_export
from tinkex.models.gguf import hf_tensors, read_gguf
from tinkex.models.tokenizer import load_tokenizer
from tinkex.testing import write_tiny_model
from tinkex.wire.errors import UserFailure

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
TOKENS = [5 + (37 * n) % 350 for n in range(24)]


@pytest.fixture(scope="module")
def trained(server: Server) -> tuple[str, list[float]]:
    """A checkpoint of an adapter that changes every layer, and the server's logprobs with it."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        for _ in range(4):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2))
        passed = training.forward([datum], "cross_entropy").result()
        path = training.save_weights_for_sampler("final").result().path
    return path, passed.loss_fn_outputs[0]["logprobs"].tolist()


def export(server: Server | StubServer | None, *args: object) -> tuple[int, str]:
    url = [] if server is None else ["--base-url", server.url]
    result = CliRunner().invoke(command, ["export", *map(str, args), *url])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def logprobs(model: Any) -> list[float]:
    with torch.no_grad():
        found = model(torch.tensor([TOKENS[:-1]])).logits[0].float().log_softmax(-1)
    return found.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def test_peft_loads_the_adapter(server, trained, tiny_model, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path, expected = trained
    old = os.umask(0o022)
    try:
        status, output = export(server, path, "--as", "peft", "-o", tmp_path / "out")
    finally:
        os.umask(old)
    assert status == 0, output
    assert f"an adapter for {TINY}" in output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert modes(tmp_path / "out") == {0o644}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    assert logprobs(model) == pytest.approx(expected, abs=1e-4)
    status, output = export(server, path, "--as", "peft", "-o", tmp_path / "out")
    assert status == 1
    assert "already exists" in output
    status, output = export(
        server, path, "--as", "peft", "-o", tmp_path / "out", "--force", "--base", "org/model"
    )
    assert status == 0, output
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/model"


def test_transformers_loads_the_merged_model(server, trained, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, expected = trained
    out = tmp_path / "merged"
    status, output = export(server, path, "--as", "hf", "-o", out, "--base", tiny_model)
    assert status == 0, output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["merged"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert logprobs(model) == pytest.approx(expected, abs=1e-4)
    assert AutoTokenizer.from_pretrained(out).encode("the sea")
    assert len(modes(out)) == 1


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-4), ("float16", 2e-2), ("q8_0", 0.2)])
def test_a_gguf_reader_computes_the_same(server, trained, tiny_model, tmp_path, dtype, near):
    from transformers import AutoModelForCausalLM

    path, expected = trained
    out = tmp_path / "pirate"
    status, output = export(
        server, path, "--as", "gguf", "-o", out, "--base", tiny_model, "--dtype", dtype
    )
    assert status == 0, output
    assert sorted(file.name for file in out.iterdir()) == ["Modelfile", "pirate.gguf"]
    assert len(modes(out)) == 1
    # Our own reader, and that of transformers.
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    base.load_state_dict(
        {name: torch.tensor(a) for name, a in hf_tensors(read_gguf(out / "pirate.gguf"))}
    )
    assert logprobs(base) == pytest.approx(expected, abs=near)
    if dtype == "float32":
        theirs = AutoModelForCausalLM.from_pretrained(
            out, gguf_file="pirate.gguf", dtype=torch.float32
        )
        assert logprobs(theirs) == pytest.approx(expected, abs=near)


class FailingNetwork:
    """Forwards to a server. While it is down, one download breaks off after `cut_after` bytes."""

    def __init__(self, server: Server, cut_after: int) -> None:
        self._url = server.url
        self._cut_after = cut_after
        self.down = True

    def __call__(self, request: Received) -> Reply:
        # The server puts the address that the client uses into its links.
        asked = urllib.request.Request(
            f"{self._url}{request.path}",
            data=request.body or None,
            headers=dict(request.headers),
            method=request.method,
        )
        with _opener.open(asked) as answer:
            body, status = answer.read(), answer.status
            headers = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in ("content-length", "connection")
            }
        cut_after = None
        if self.down and (wanted := wanted_range(request)) is not None:
            cut_after = self._cut_after if wanted == "bytes=0-" else 0
        return Reply(status=status, body=body, headers=headers, cut_after=cut_after)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        return fp


_opener = urllib.request.build_opener(_NoRedirects)


def wanted_range(request: Received) -> str | None:
    """The bytes of a download; None for other requests, and for the one that asks for the size."""
    wanted = request.headers.get("range")
    return None if "/downloads/" not in request.path or wanted == "bytes=0-0" else wanted


def test_an_export_whose_download_broke_off_fetches_only_the_rest(
    server, trained, tmp_path, monkeypatch
):
    path, _ = trained
    assert export(server, path, "--as", "peft", "-o", tmp_path / "whole")[0] == 0
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.3")
    network, out = FailingNetwork(server, cut_after=5_000), tmp_path / "out"
    with stub_server(network) as between:
        status, output = export(between, path, "--as", "peft", "-o", out)
        assert status == 1, output
        assert "error: The download broke off after 5,000 of " in output
        assert "hint: Start it again: it resumes there." in output
        assert not out.exists()
        tried = [wanted for one in between.requests if (wanted := wanted_range(one))]
        assert tried[0] == "bytes=0-"
        assert set(tried[1:]) == {"bytes=5000-"}
        network.down = False
        between.requests.clear()
        status, output = export(between, path, "--as", "peft", "-o", out)
        assert status == 0, output
        fetched = [wanted for one in between.requests if (wanted := wanted_range(one))]
    assert fetched == ["bytes=5000-"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "whole"]
    for file in (tmp_path / "whole").iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()


def test_the_vocabulary_and_the_chat_format_are_in_the_file(server, trained, tiny_model, tmp_path):
    out = tmp_path / "pirate"
    args = (trained[0], "--as", "gguf", "-o", out, "--base", tiny_model)
    status, output = export(server, *args)
    assert status == 0, output
    found = read_gguf(out / "pirate.gguf").metadata
    tokenizer = load_tokenizer(tiny_model)
    tokens = found["tokenizer.ggml.tokens"]
    assert tokens == [tokenizer.convert_ids_to_tokens(n) for n in range(len(tokenizer))]
    kinds = found["tokenizer.ggml.token_type"]
    assert [n for n, kind in enumerate(kinds) if kind == 3] == [0, 1, 2]
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    text = (out / "Modelfile").read_text()
    assert text.startswith("FROM ./pirate.gguf\n")
    assert "{{ .Role }}" in text
    assert 'PARAMETER stop "<|im_end|>"' in text


def test_a_system_message_of_the_template_is_in_the_modelfile(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + str(tokenizer.chat_template)
    )
    assert 'SYSTEM """Be kind."""' in gguf_export.modelfile(tokenizer, "a.gguf")
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert gguf_export.modelfile(tokenizer, "a.gguf") == (
        'FROM ./a.gguf\nPARAMETER stop "<|im_end|>"\n'
    )


def test_qwen3_is_written_with_its_norms_and_without_reordered_rows(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / "qwen", arch="qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder)
    gguf_export.write_gguf(model, folder, tmp_path / "q.gguf", name="q", format="float32")
    file = read_gguf(tmp_path / "q.gguf")
    assert file.metadata["general.architecture"] == "qwen3"
    state = model.state_dict()
    for name, theirs in (
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
    ):
        np.testing.assert_array_equal(file.tensors[name], state[theirs].numpy())


def test_llama_3_has_the_factors_of_its_rotations():
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters=scaling,
    )
    factors = gguf_export.rope_factors(LlamaForCausalLM(config), 32)
    assert factors is not None
    assert factors[0] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(8.0)
    other = SimpleNamespace(config=SimpleNamespace(rope_parameters={"rope_type": "yarn"}))
    with pytest.raises(UserFailure, match="'yarn' cannot be written"):
        gguf_export.rope_factors(other, 32)


@pytest.mark.parametrize(
    ("pre_tokenizer", "expected"),
    [
        ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "use_regex": True},
                ],
            },
            "smollm",
        ),
        ({"type": "Metaspace"}, None),
        (None, None),
    ],
)
def test_the_splitting_of_text_is_named_or_refused(pre_tokenizer, expected):
    spec = {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "pre_tokenizer": pre_tokenizer,
    }
    if expected is None:
        with pytest.raises(UserFailure, match="this tokenizer cannot be written as GGUF"):
            gguf_export.vocabulary_of(spec, 2)
    else:
        found = gguf_export.vocabulary_of(spec, 2)
        assert found.splitter == expected
        assert found.tokens == ["a", "[PAD1]"]


def test_the_output_projection_of_the_hosted_service_gets_the_name_of_peft(tmp_path):
    from safetensors.numpy import load_file, save_file

    prefix = "base_model.model."
    arrays = {
        f"{prefix}model.unembed_tokens.lora_A.weight": np.ones((2, 3), np.float32),
        f"{prefix}model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((2, 3), np.float32),
    }
    save_file(arrays, tmp_path / "a", metadata={"format": "pt"})
    copy_with_peft_names(tmp_path / "a", tmp_path / "b")
    found = load_file(tmp_path / "b")
    assert set(found) == {
        f"{prefix}lm_head.lora_A.weight",
        f"{prefix}model.layers.0.mlp.up_proj.lora_A.weight",
    }
    assert found[f"{prefix}lm_head.lora_A.weight"].sum() == 6
    with (tmp_path / "b").open("rb") as file:
        assert struct.unpack("<Q", file.read(8))[0] % 8 == 0


@pytest.mark.parametrize("contents", [b"", b"\xff" * 8, b"\x04\0\0\0\0\0\0\0[[[["])
def test_a_broken_file_of_weights_is_refused(contents, trained, server, tmp_path):
    adapter = tmp_path / "adapter"
    status, output = export(server, trained[0], "--as", "peft", "-o", adapter)
    assert status == 0, output
    (adapter / "adapter_model.safetensors").write_bytes(contents)
    status, output = export(None, adapter, "--as", "peft", "-o", tmp_path / "out")
    assert status == 1
    assert "adapter_model.safetensors is not a safetensors file." in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not a checkpoint: adapter_config.json cannot be read"),
        ("[" * 100_000, "is not a checkpoint: adapter_config.json cannot be read"),
        ("[]", "is not the config of an adapter"),
        ('{"r": "8"}', "is not the config of an adapter"),
        ('{"r": 8, "target_modules": [1]}', "is not the config of an adapter"),
        (" " * (5 << 20), "is not a checkpoint: adapter_config.json cannot be read"),
        ('{"r": 8, "base_model_name_or_path": {"a": 1}}', "does not name its base model"),
        (json.dumps({"r": 8, "base_model_name_or_path": "x" * 5000}), "does not name its base"),
    ],
)
def test_a_broken_config_is_refused(config, message, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(config)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    status, output = export(None, adapter, "--as", "peft", "-o", tmp_path / "out")
    assert status == 1
    assert message in output
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_sentence_and_leave_nothing(server, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = trained
    for args, message in (
        (("nowhere", "--as", "hf"), "nowhere is neither a tinker:// path nor a folder."),
        ((path, "--as", "peft", "--dtype", "float32"), "--dtype is for hf and gguf"),
        ((path, "--as", "hf", "--dtype", "q8_0"), "--dtype q8_0 is for gguf"),
        ((path, "--as", "hf", "--base", "no/such"), "no/such"),
        ((f"{path}-no", "--as", "peft"), "error: "),
    ):
        status, output = export(server, *args)
        assert status in (1, 2), output
        assert message in output
    assert list(tmp_path.iterdir()) == []


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("kept")
    monkeypatch.chdir(tmp_path)
    status, output = export(None, tmp_path, "--as", "peft", "-o", ".", "--force")
    assert status == 1
    assert "never replaced" in output
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_user_without_a_home_folder_replaces_what_is_not_the_current_one(tmp_path, monkeypatch):
    """In a container, a user may be a number that has no name and no home folder."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    (tmp_path / "out").mkdir()
    assert may_be_replaced(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    assert not may_be_replaced(tmp_path / "out")
    assert not may_be_replaced(tmp_path)


def test_a_folder_whose_replacement_fails_stays_in_its_place(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("kept")
    rename = Path.rename

    def refuse_new(path, to):
        if (path / "new").exists():
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="quota"), replacing(target) as part:
        (part / "new").write_text("x")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert (target / "mine").read_text() == "kept"

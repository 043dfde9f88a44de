"""The real embedded model: downloaded, loaded and evaluated."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tinkex.models.embedded import FetchFailed, ensure_embedded
from tinkex.models.gguf import hf_tensors, read_gguf
from tinkex.models.tokenizer import load_tokenizer

# The first use downloads 93 MB.
pytestmark = pytest.mark.timeout(300)

PROSE = """\
The harbour was quiet in the early morning. A few fishermen were mending their nets on the stone \
steps, and the first ferry of the day lay at its berth with its engines idling. Anna had come down \
from the village before sunrise, because she wanted to see the boats leave. She carried a small \
basket with bread and cheese, and she sat on a bench near the lighthouse to eat her breakfast.

After a while an old man came and sat beside her. He told her that he had worked on the ferry for \
thirty years, and that in winter the crossing could be so rough that the passengers were forbidden \
to leave the cabin. Now he was retired, but he still walked down to the water every day to look at \
the weather and to talk with the captain.
"""


@pytest.fixture(scope="module")
def folder():
    try:
        return ensure_embedded()
    except FetchFailed as error:
        pytest.skip(str(error))


def test_it_reads_english_and_knows_the_capital_of_france(folder):
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = dict(hf_tensors(read_gguf(folder / "model.gguf")))
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    missing = model.load_state_dict(tensors, strict=False, assign=True)
    assert missing.missing_keys == ["lm_head.weight"]  # tied to the embedding
    assert not missing.unexpected_keys
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008

    tokenizer = load_tokenizer(folder)
    with torch.inference_mode():
        ids = torch.tensor([tokenizer.encode(PROSE)])
        assert 10 < math.exp(model(ids, labels=ids).loss) < 35
        question = torch.tensor([tokenizer.encode("The capital of France is")])
        next_id = int(model(question).logits[0, -1].argmax())
    assert tokenizer.decode(next_id) == " Paris"


def test_its_tokenizer_is_the_same_here_and_in_transformers(folder):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert len(ours) == len(theirs) == 49152
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert (ours.eos_token_id, ours.pad_token_id) == (2, 2)
    for text in (
        PROSE,
        "In 1984, 3.14159 x 100 = 314.159",
        "naïve café, 日本語, 🙂\t\n  \n",
        "<|im_start|>user\nHi<|im_end|>",
        "\tdef f(x):\n\t\treturn x ** 2",
    ):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("Hello 42")[-2:] == [ours.convert_tokens_to_ids(digit) for digit in "42"]
    assert ours.decode([1, 9690, 2], skip_special_tokens=True) == ours.decode([9690])


def test_its_chat_template_is_the_same_here_and_in_transformers(folder):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    text = ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")
    assert text == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ours.apply_chat_template(chat, add_generation_prompt=True) == list(ids)

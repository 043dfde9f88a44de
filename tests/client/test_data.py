"""`tinkex.data`: rows of files, tokens with weights through chat templates, batches."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tinkex import data
from tinkex.models.tokenizer import Tokenizer, load_tokenizer

CHAT = [
    {"role": "system", "content": "You are a captain."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "How many days are there in a week?"},
    {"role": "assistant", "content": "Seven."},
]
#: Removes the reasoning of all answers but the last, as Qwen3's does.
FORGETS_REASONING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>{{ message.reasoning }}</think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


def learned(tokenizer: Tokenizer, example: data.Example) -> str:
    """The text that has weight."""
    return tokenizer.decode([t for t, w in zip(example.tokens, example.weights, strict=True) if w])


def test_only_the_answers_of_a_chat_are_learned_up_to_the_end_of_their_turn(tokenizer):
    [example] = data.examples(tokenizer, {"messages": CHAT})
    assert (
        learned(tokenizer, example) == "The capital of France is Paris.<|im_end|>Seven.<|im_end|>"
    )
    whole = tokenizer.apply_chat_template(CHAT)
    assert example.tokens == whole[: len(example.tokens)]
    assert tokenizer.decode(whole[len(example.tokens) :]) == "\n"
    assert len(example) == len(example.weights)


def test_roles_and_weights_of_messages_choose_what_is_learned(tokenizer):
    [users] = data.examples(tokenizer, {"messages": CHAT}, train_on=("user",))
    assert learned(tokenizer, users) == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>"
        "<|im_start|>user\nHow many days are there in a week?<|im_end|>"
    )
    weighted = [*CHAT[:2], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 0.5}]
    [last] = data.examples(tokenizer, {"messages": weighted})
    assert learned(tokenizer, last) == "Seven.<|im_end|>"
    assert set(last.weights) == {0.0, 0.5}


def test_a_template_that_changes_earlier_messages_gives_an_example_for_each_answer(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = FORGETS_REASONING
    chat = [{**message, "reasoning": "hm"} for message in CHAT]
    first, second = data.examples(tokenizer, {"messages": chat})
    assert learned(tokenizer, first) == "<think>hm</think>The capital of France is Paris.<|im_end|>"
    assert learned(tokenizer, second) == "<think>hm</think>Seven.<|im_end|>"
    prompt = tokenizer.apply_chat_template(chat[:4], add_generation_prompt=True)
    assert second.tokens[: len(prompt)] == prompt
    assert not any(second.weights[: len(prompt)])


def test_an_answer_follows_the_tokens_of_its_prompt_even_where_text_would_merge(tokenizer):
    """A line break after that of the prompt would be one token with it."""
    chat = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "\n\n  the sea"}]
    prompt = data.prompt_tokens(tokenizer, "Go")
    [example] = data.examples(tokenizer, {"messages": chat})
    assert example.tokens[: len(prompt)] == prompt
    assert learned(tokenizer, example) == "\n\n  the sea<|im_end|>"


def test_the_tokenizer_of_transformers_gives_the_same(tokenizer, tiny_model):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_model)
    for row in ({"messages": CHAT}, {"prompt": "Who?", "completion": "Me."}):
        assert data.examples(theirs, row) == data.examples(tokenizer, row)
    assert data.prompt_tokens(theirs, "Who?") == data.prompt_tokens(tokenizer, "Who?")


def test_a_completion_is_a_chat_or_plain_text(tokenizer):
    row = {"prompt": "the sea was", "completion": " calm"}
    [chat] = data.examples(tokenizer, row)
    messages = [{"role": "user", "content": "the sea was"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert chat.tokens[: len(prompt)] == prompt
    assert learned(tokenizer, chat) == " calm<|im_end|>"
    [plain] = data.examples(tokenizer, row, plain=True)
    assert tokenizer.decode(plain.tokens) == "the sea was calm<|im_end|>"
    assert learned(tokenizer, plain) == " calm<|im_end|>"


def test_the_answers_of_a_preference_share_their_prompt(tokenizer):
    texts = {"prompt": "Who?", "chosen": "A captain.", "rejected": "A cat."}
    pair = data.pair(tokenizer, texts)
    assert learned(tokenizer, pair.chosen) == "A captain.<|im_end|>"
    assert learned(tokenizer, pair.rejected) == "A cat.<|im_end|>"
    assert len(pair) == len(pair.chosen) + len(pair.rejected)
    prompt = [{"role": "user", "content": "Who?"}]
    sides = {
        name: [*prompt, {"role": "assistant", "content": texts[name]}]
        for name in ("chosen", "rejected")
    }
    assert data.pair(tokenizer, sides) == pair
    assert data.pair(tokenizer, {**texts, "prompt": prompt}) == pair
    with pytest.raises(data.DataError, match="rejected: must have one answer"):
        data.pair(tokenizer, {**sides, "rejected": prompt})


def test_a_datum_predicts_the_next_token(tokenizer):
    [example] = data.examples(tokenizer, {"prompt": "Who?", "completion": "Me."})
    datum = example.datum()
    assert datum.model_input.to_ints() == example.tokens[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == example.tokens[1:]
    assert datum.loss_fn_inputs["weights"].tolist() == example.weights[1:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [}', "line 2: not JSON: Expecting value at column 15"),
        ("[1]", "line 2: is a list, not an object"),
        ('{"text": "a"}', "line 2: has the fields 'text'. Expected a chat"),
        ('{"messages": "a"}', "line 2: messages: is a text, not a list of messages"),
        ('{"messages": []}', "line 2: messages: is empty"),
        ('{"messages": [1]}', r"line 2: messages[0]: is a number, not a message"),
        ('{"messages": [{"content": "a"}]}', "line 2: messages[0].role: is missing"),
        (
            '{"messages": [{"role": "user", "content": 1}]}',
            "line 2: messages[0].content: is a number, not a text",
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "weight": -1}]}',
            "line 2: messages[0].weight: is -1, not a number from 0 on",
        ),
        ('{"prompt": "a", "completion": 3}', "line 2: completion: is a number"),
        ('{"prompt": "a", "completion": ""}', "line 2: completion: is empty"),
        ('{"chosen": "a", "rejected": "b"}', "line 2: prompt: is missing"),
        ('{"prompt": "a", "completion": "b"}', "line 2: completion: this row is a completion"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 3}', "line 2: tools: is"),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_field(tmp_path, line, message):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + f"\n{line}\n")
    with pytest.raises(data.DataError) as raised:
        data.read(file)
    assert f"{file}, {message}" in str(raised.value)


def test_a_file_may_have_empty_lines_and_a_byte_order_mark_but_not_be_empty(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": CHAT}).encode() + b"\n\n")
    [row] = data.read(file)
    assert row.kind == "chat"
    file.write_bytes(b"\n")
    with pytest.raises(data.DataError, match="the file is empty"):
        data.read(file)
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(data.DataError, match="line 1: not UTF-8 at byte 12"):
        data.read(file)


def test_rendering_errors_name_their_line_too(tmp_path, tokenizer):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT[:2]}))
    [row] = data.read(file)
    with pytest.raises(data.DataError, match=r"line 1: messages: there is nothing to learn"):
        data.examples(tokenizer, row)


def test_batches_have_every_item_once_and_items_of_similar_length():
    items = ["x" * (n % 50) for n in range(400)]
    made = data.batches(items, 8, seed=3)
    assert sorted(map(len, made)) == [8] * 50
    assert sorted(item for batch in made for item in batch) == sorted(items)
    assert made == data.batches(items, 8, seed=3) != data.batches(items, 8, seed=4)
    spread = sum(len(max(batch, key=len)) - len(min(batch, key=len)) for batch in made) / len(made)
    assert spread < 8  # shuffled alone: about 40
    lengths = [len(batch[0]) for batch in made]
    assert lengths != sorted(lengths)


def test_a_stream_goes_on_where_another_one_stopped():
    items = [str(n) for n in range(10)]
    whole = data.stream(items, 4, seed=1)
    first = [next(whole) for _ in range(7)]
    later = data.stream(items, 4, seed=1, start=5)
    assert [next(later) for _ in range(2)] == first[5:]
    assert sorted(item for batch in first[:3] for item in batch) == items
    with pytest.raises(ValueError, match="no items"):
        next(data.stream([], 4))


def test_a_split_is_repeatable_and_leaves_something_to_train_on():
    kept, held = data.split(range(20), 0.1)
    assert (len(kept), len(held)) == (18, 2)
    assert sorted([*kept, *held]) == list(range(20))
    assert data.split(range(20), 0.1) == (kept, held)
    assert data.split([1], 0) == ([1], [])
    with pytest.raises(ValueError, match="too few to hold out"):
        data.split([1], 0.1)


@pytest.mark.parametrize("name", [each for each in data.__all__ if each.islower()])
def test_the_example_in_its_docstring_runs(name, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    code = textwrap.dedent(str(getattr(data, name).__doc__).partition("Example:\n")[2])
    exec(code, {"data": data, "tokenizer": tokenizer, "print": lambda *_: None})  # noqa: S102


def test_it_is_plain_python():
    code = "import tinkex.data, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"torch", "transformers", "numpy", "pydantic", "tokenizers", "aiohttp"} & loaded

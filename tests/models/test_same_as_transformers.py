"""
M6: the light tokenizer gives the tokens and chat texts of transformers.

Compares the light tokenizer with that of transformers on the embedded model, the tiny
model and several other folders. It refuses everything that it does not implement.
"""

import inspect
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from tinkex.models.embedded import FetchFailed, ensure_embedded
from tinkex.models.tokenizer import (
    NAMED_TOKENS,
    NEUTRAL_ARGUMENTS,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)

TEXTS = (
    "every road leads home",
    "In 1984, 3.14159 x 100 = 314.159",
    "naïve café, 日本語, 🙂\t\n  \n",
    "<|im_start|>user\nHi<|im_end|>",
    "<s>one</s><pad> two <tool>x</tool>",
    "",
    "  leading, and trailing  ",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2? <s>"},
    {"role": "assistant", "content": "It is "},
]
#: Writes BOS itself, does not trim, reads tools, documents and variables of the caller.
KEEPS = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% for d in documents or [] %}{{ d.title }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ thinking }}"
)
TRIMS = KEEPS.replace("{{ m.content }}", "{{ m.content | trim }}")


def bytes_folder(folder: Path, **config: object) -> Path:
    """Every byte is a token; BOS is added by the post-processor, as Llama 3 does."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<tool>"])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 257)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(
    params=["tiny", "embedded", "plain", "further", "only_in_the_config", "several_templates"]
)
def folder(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path) -> Path:
    plain = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": KEEPS}
    match request.param:
        case "tiny":
            return tiny_model
        case "embedded":
            try:
                return ensure_embedded()
            except FetchFailed as error:
                pytest.skip(str(error))
        case "plain":
            return bytes_folder(tmp_path / "m", **plain)
        case "further":
            return bytes_folder(
                tmp_path / "m",
                **plain,
                pad_token={"__type": "AddedToken", "content": "</s>"},
                additional_special_tokens=["<tool>", "</tool>"],
            )
        case "only_in_the_config":
            listed = {
                "content": "<tool>",
                "lstrip": True,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            return bytes_folder(
                tmp_path / "m", **plain, pad_token="<pad>", added_tokens_decoder={"256": listed}
            )
        case _:
            several = [
                {"name": "default", "template": TRIMS},
                {"name": "tool_use", "template": KEEPS},
            ]
            return bytes_folder(tmp_path / "m", **{**plain, "chat_template": several})


@pytest.fixture
def both(folder: Path):
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_m6_texts_give_the_same_tokens_and_tokens_the_same_texts(both):
    ours, theirs = both
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.tokenize(text, add_special_tokens=special) == theirs.tokenize(
                text, add_special_tokens=special
            )
            encoded = ours(text, add_special_tokens=special)
            assert encoded == dict(theirs(text, add_special_tokens=special))
            assert encoded.input_ids == encoded["input_ids"] == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
            assert ours.convert_ids_to_tokens(ids, skip) == theirs.convert_ids_to_tokens(ids, skip)
        tokens = theirs.convert_ids_to_tokens(ids)
        assert ours.convert_tokens_to_ids(tokens) == ids
        assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)
    many = ours(list(TEXTS), return_offsets_mapping=True)
    assert many == dict(theirs(list(TEXTS), return_offsets_mapping=True))
    assert ours.batch_decode(many.input_ids) == theirs.batch_decode(many.input_ids)
    assert ours.decode(many.input_ids) == ours.batch_decode(many.input_ids)


def test_m6_the_special_tokens_are_the_same(both):
    ours, theirs = both
    for name in NAMED_TOKENS:
        assert getattr(ours, name) == getattr(theirs, name), name
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id"), name
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert ours.get_vocab() == theirs.get_vocab()
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert ours.model_max_length == theirs.model_max_length
    assert ours.convert_tokens_to_ids("no such token") == theirs.convert_tokens_to_ids(
        "no such token"
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"tools": [{"name": "é", "parameters": {}}]},
        {"documents": [{"title": "T", "text": "x"}], "thinking": False},
        {"chat_template": KEEPS, "continue_final_message": True},
        {"chat_template": TRIMS, "continue_final_message": True},
        {"return_dict": False, "truncation": False, "padding": False, "return_tensors": None},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_m6_conversations_are_rendered_the_same(both, options):
    ours, theirs = both
    for text in (CHAT, CHAT[:2], [*CHAT[:2], {**CHAT[2], "reasoning": "sum"}]):
        rendered = theirs.apply_chat_template(text, **{**options, "tokenize": False})
        assert ours.apply_chat_template(text, **{**options, "tokenize": False}) == rendered
        ids = theirs.apply_chat_template(text, **{**options, "return_dict": False})
        assert ours.apply_chat_template(text, **{**options, "return_dict": False}) == ids
        as_dict = ours.apply_chat_template(text, **{**options, "return_dict": True})
        assert as_dict == dict(theirs.apply_chat_template(text, **{**options, "return_dict": True}))
    two = [CHAT, CHAT[:2]]
    assert ours.apply_chat_template(two, **{**options, "return_dict": False}) == (
        theirs.apply_chat_template(two, **{**options, "return_dict": False})
    )
    assert ours.get_chat_template() == theirs.get_chat_template()


def test_m6_a_continued_message_stays_open(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    text = tokenizer.apply_chat_template(CHAT, continue_final_message=True, tokenize=False)
    assert text.rstrip().endswith("It is")
    with pytest.raises(ValueError, match="Use only one"):
        tokenizer.apply_chat_template(CHAT, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ValueError, match="no text under 'content'"):
        tokenizer.apply_chat_template([{"role": "user"}], continue_final_message=True)
    with pytest.raises(ValueError, match="omits the text"):
        tokenizer.apply_chat_template(CHAT, continue_final_message=True, chat_template="x")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}]
    template = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}."
    assert (
        tokenizer.apply_chat_template(
            parts, continue_final_message=True, chat_template=template, tokenize=False
        )
        == "Hi"
    )


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("encode", {"return_tensors": "pt"}),
        ("encode", {"truncation": True, "max_length": 3}),
        ("encode", {"text_pair": "x"}),
        ("encode", {"no_such_option": 1}),
        ("__call__", {"padding": True}),
        ("__call__", {"return_tensors": "np"}),
        ("__call__", {"return_special_tokens_mask": True}),
        ("tokenize", {"split_special_tokens": True}),
        ("decode", {"clean_up_tokenization_spaces": True}),
        ("batch_decode", {"clean_up_tokenization_spaces": True}),
        ("apply_chat_template", {"return_tensors": "pt"}),
        ("apply_chat_template", {"truncation": True}),
        ("apply_chat_template", {"max_length": 3}),
        ("apply_chat_template", {"return_assistant_tokens_mask": True}),
        ("apply_chat_template", {"tokenizer_kwargs": {"padding": True}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_m6_what_is_not_implemented_is_refused_by_name(tiny_model, call, options):
    given = {"decode": [1, 2], "batch_decode": [[1, 2]], "apply_chat_template": CHAT}
    with pytest.raises(TypeError, match=f"{next(iter(options))}=.*pip install transformers"):
        getattr(load_tokenizer(tiny_model), call)(given.get(call, "text"), **options)


def test_m6_no_argument_of_transformers_becomes_a_template_variable(tiny_model):
    """Every argument of transformers is known here: either implemented or refused."""
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    known = {*inspect.signature(Tokenizer.apply_chat_template).parameters, *NEUTRAL_ARGUMENTS}
    for argument in inspect.signature(theirs.apply_chat_template).parameters.values():
        assert argument.kind is argument.VAR_KEYWORD or argument.name in known


def test_functions_as_tools_and_unknown_tokens_are_refused(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    with pytest.raises(TypeError, match="JSON schemas"):
        tokenizer.apply_chat_template(CHAT, tools=[print])
    with pytest.raises(TypeError, match="each a dict"):
        tokenizer.apply_chat_template(["Hi"])
    with pytest.raises(TokenizerError, match="no such token"):
        tokenizer.pad_token = "<never seen>"
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tokenizer.pad_token_id = 0
    assert tokenizer.pad_token == tokenizer.convert_ids_to_tokens(0)
    assert bool(tokenizer)


def test_templates_by_name(tmp_path):
    several = [{"name": "a", "template": "A"}, {"name": "tool_use", "template": "T"}]
    tokenizer = load_tokenizer(bytes_folder(tmp_path / "m", chat_template=several))
    assert tokenizer.get_chat_template("a") == "A"
    assert tokenizer.get_chat_template(tools=[{}]) == "T"
    with pytest.raises(TokenizerError, match="one of a, tool_use"):
        tokenizer.apply_chat_template(CHAT)

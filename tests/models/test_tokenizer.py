"""The tokenizer wrapper on several kinds of folders."""

import json
import os

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from tinkex.models.tokenizer import TokenizerError, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    """Every byte is a token; BOS is added by the post-processor, as Llama 3 does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_special_tokens_are_added_unless_unwanted(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hi")[0] == 256
    assert tokenizer.encode("hi") == [256, *tokenizer.encode("hi", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("hi")) == "<s>hi"
    assert tokenizer.decode(tokenizer.encode("hi"), skip_special_tokens=True) == "hi"
    assert tokenizer.decode(257) == "</s>"


def test_tokens_may_be_written_as_words_or_with_options(folder):
    configure(folder, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.pad_token_id is None


@pytest.mark.parametrize("place", ["config", "named", "file"])
def test_the_chat_template_is_found_in_all_places(folder, place):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    if place == "config":
        configure(folder, bos_token="<s>", chat_template=template)
    elif place == "named":
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "x"}]
        configure(folder, bos_token="<s>", chat_template=named)
    else:
        configure(folder, bos_token="<s>", chat_template="outdated")
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hi"
    # the template writes BOS, so encoding must not add another
    assert tokenizer.apply_chat_template(chat) == tokenizer.encode("hi")


def test_templates_may_use_the_functions_of_transformers(folder):
    template = (
        "{% for m in messages %}\n"
        "    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {%- generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{%- endfor %}{{ tools | length }}{{ strftime_now('%Y') | length }}{{ thinking }}"
    )
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "skip"}, {"role": "é"}],
        tokenize=False,
        tools=[{}, {}],
        chat_template=template,
        thinking=True,
    )
    assert text == '{"role": "é"}24True'


def test_an_exception_of_the_template_reaches_the_user(folder):
    configure(folder, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        load_tokenizer(folder).apply_chat_template([])


def test_templates_cannot_reach_into_python(folder):
    configure(folder, chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(Exception, match="unsafe"):
        load_tokenizer(folder).apply_chat_template([])


def test_no_template_and_no_tokenizer_say_what_to_do(folder, tmp_path):
    with pytest.raises(TokenizerError, match="chat_template="):
        load_tokenizer(folder).apply_chat_template([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match="save_pretrained"):
        load_tokenizer(tmp_path / "empty")


def test_the_name_of_the_folder_need_not_be_utf_8(folder, tmp_path):
    other = tmp_path / os.fsdecode(b"m\xff")
    other.mkdir()
    (folder / "tokenizer.json").rename(other / "tokenizer.json")
    assert load_tokenizer(other).encode("a")


def test_name_or_path_is_the_model_name_or_the_folder(folder):
    assert load_tokenizer(folder, name="Qwen/Qwen3-8B").name_or_path == "Qwen/Qwen3-8B"
    assert load_tokenizer(folder).name_or_path == str(folder)

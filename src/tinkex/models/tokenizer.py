"""Text to token ids and back, chat templates included, from a model's folder alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import jinja2
    import tokenizers

Message = Mapping[str, Any]


class TokenizerError(ValueError):
    """The folder has no tokenizer that can be used, or the tokenizer cannot do what was asked."""


def load_tokenizer(folder: str | Path, *, name: str | None = None) -> Tokenizer:
    """The tokenizer in this folder: `tokenizer.json`, and `tokenizer_config.json` if there is one."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(
            f"{folder} has no tokenizer.json. Save the model's fast tokenizer into the folder: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    try:
        from tokenizers import Tokenizer as Backend
    except ModuleNotFoundError as error:
        raise TokenizerError(
            "Tokenizing needs tokenizers, which is not installed: pip install 'tinkex[tokenizer]'"
        ) from error
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    return Tokenizer(backend, config=_config_of(folder), name=name or str(folder))


def _config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path := folder / name).is_file():
            config.update(json.loads(path.read_text(encoding="utf-8")))
    # Where newer folders keep the template; it wins over one inside the config.
    if (template := folder / "chat_template.jinja").is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config


class Tokenizer:
    """
    A fast tokenizer with the names that programs know from transformers, and none of its weight.

        tokenizer = load_tokenizer(folder)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        text = tokenizer.decode(ids, skip_special_tokens=True)
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, config: Mapping[str, Any], name: str = ""
    ) -> None:
        # A saved tokenizer may carry the padding of its training run; ids here are as they are.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        #: The model it belongs to, or its folder: programs choose their chat format by it.
        self.name_or_path = name
        self._config = config
        self._templates: dict[str, jinja2.Template] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(id) for id in token_ids]
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        add_generation_prompt: bool = ...,
        tokenize: Literal[True] = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        **variables: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        add_generation_prompt: bool = ...,
        tokenize: Literal[False],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        **variables: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The conversation as the model was trained to read it: ids, or text if not `tokenize`."""
        template = self._template(chat_template or self.chat_template)
        text = template.render(
            messages=conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens(),
            **variables,
        )
        # The template writes BOS and its like itself.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """How many ids there are, special tokens included."""
        return len(self)

    @property
    def bos_token(self) -> str | None:
        return self._named_token("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._named_token("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._named_token("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of(self.pad_token)

    @property
    def chat_template(self) -> str:
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        if not isinstance(template, str):
            raise TokenizerError(
                "This model's folder has no chat template: it is a base model, or the template "
                "was left out. Give one as chat_template=..., or encode() the text yourself."
            )
        return template

    def _named_token(self, name: str) -> str | None:
        token = self._config.get(name)
        if isinstance(token, Mapping):  # how transformers writes tokens with options
            token = token.get("content")
        return token if isinstance(token, str) else None

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
        return {name: token for name in names if (token := self._named_token(name)) is not None}

    def _template(self, text: str) -> jinja2.Template:
        if text not in self._templates:
            self._templates[text] = _compiled(text)
        return self._templates[text]


def _compiled(text: str) -> jinja2.Template:
    """The template with the settings and the names that chat templates are written against."""
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise TokenizerError(
            "Chat templates need jinja2, which is not installed: pip install 'tinkex[tokenizer]'"
        ) from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant said; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own name and type)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TokenizerError(f"The chat template refuses this conversation: {message}")

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)

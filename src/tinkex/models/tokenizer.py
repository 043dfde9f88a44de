"""
A light tokenizer with chat templates, loaded from a model folder.

If transformers is installed, clients return its tokenizer instead (`client/tokenizer.py`). This one
has the same method names and gives the same tokens. Arguments of transformers that it does not
implement are refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from tinkex import display
from tinkex.extras import MissingExtra, needs
from tinkex.models.chat_template import Message, TokenizerError, render

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Encoded", "Tokenizer", "TokenizerError", "load_tokenizer"]

#: Names of special tokens, in the order of transformers.
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
#: Arguments of transformers that are accepted with these values, because they have no effect.
NEUTRAL_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "text_pair": (None,),
    "padding": (False, None, "do_not_pad"),
    "truncation": (False, None, "do_not_truncate"),
    "max_length": (None,),
    "stride": (0,),
    "is_split_into_words": (False,),
    "return_tensors": (None,),
    "return_token_type_ids": (False, None),
    "return_overflowing_tokens": (False,),
    "return_special_tokens_mask": (False,),
    "return_length": (False,),
    "return_assistant_tokens_mask": (False,),
    "sanitize_control_tokens": (False,),
    "split_special_tokens": (False,),
    "clean_up_tokenization_spaces": (False, None),
    "tokenizer_kwargs": (None, {}),
    "verbose": (True, False),
}


def load_tokenizer(folder: str | Path, *, name: str | None = None) -> Tokenizer:
    """
    Load `tokenizer.json`, and `tokenizer_config.json` if there is one.

    Args:
        folder: Folder of a model.
        name: Name of the model; None: the folder.

    Returns:
        The tokenizer.

    Raises:
        TokenizerError: No `tokenizer.json` in the folder.

    Example:
        tokenizer = load_tokenizer(folder, name="some/model")
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(
            f"{folder} has no tokenizer.json. Save the model's fast tokenizer into the folder: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    try:
        with needs("A tokenizer"):
            from tokenizers import Tokenizer as Backend
    except MissingExtra as error:
        raise TokenizerError(str(error)) from error
    # Not `from_file`: it refuses a folder whose name is not UTF-8.
    backend = Backend.from_buffer((folder / "tokenizer.json").read_bytes())
    return Tokenizer(backend, config=_config_of(folder), name=name or str(folder))


def _config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path := folder / name).is_file():
            config.update(json.loads(path.read_text(encoding="utf-8")))
    # Newer folders have the template here; it takes precedence over the one in the config.
    if (template := folder / "chat_template.jinja").is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config


class Encoded(dict[str, Any]):
    """The result of a tokenizer: `input_ids` and `attention_mask`, as keys or attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _NamedToken:
    """A settable attribute such as `pad_token`: a text, or None."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, holder: Tokenizer, _: type | None = None) -> str | None:
        return holder._named.get(self.name)

    def __set__(self, holder: Tokenizer, token: str | None) -> None:
        if token is not None and holder.backend.token_to_id(token) is None:
            raise TokenizerError(
                f"{self.name} = {token!r}: the vocabulary has no such token, and the model has no "
                "weights for a new one. Use a token of the vocabulary."
            )
        holder._named[self.name] = token


class _NamedTokenId:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, holder: Tokenizer, _: type | None = None) -> int | None:
        token = holder._named.get(self.name)
        return None if token is None else holder.backend.token_to_id(token)

    def __set__(self, holder: Tokenizer, token_id: int | None) -> None:
        token = None if token_id is None else holder.backend.id_to_token(token_id)
        if token_id is not None and token is None:
            raise TokenizerError(f"{self.name}_id = {token_id}: the vocabulary has no such id.")
        holder._named[self.name] = token


class Tokenizer:
    """
    A fast tokenizer with the method names of transformers, without depending on it.

        tokenizer = load_tokenizer(folder)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        text = tokenizer.decode(ids, skip_special_tokens=True)
    """

    is_fast = True
    bos_token, bos_token_id = _NamedToken("bos_token"), _NamedTokenId("bos_token")
    eos_token, eos_token_id = _NamedToken("eos_token"), _NamedTokenId("eos_token")
    unk_token, unk_token_id = _NamedToken("unk_token"), _NamedTokenId("unk_token")
    sep_token, sep_token_id = _NamedToken("sep_token"), _NamedTokenId("sep_token")
    pad_token, pad_token_id = _NamedToken("pad_token"), _NamedTokenId("pad_token")
    cls_token, cls_token_id = _NamedToken("cls_token"), _NamedTokenId("cls_token")
    mask_token, mask_token_id = _NamedToken("mask_token"), _NamedTokenId("mask_token")

    def __init__(
        self, backend: tokenizers.Tokenizer, *, config: Mapping[str, Any], name: str = ""
    ) -> None:
        # A saved tokenizer may have the padding and truncation of its training run.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        #: Name or folder of its model. Some programs choose their chat format by it.
        self.name_or_path = name
        self._named: dict[str, str | None] = {
            name: _content(config.get(name)) for name in NAMED_TOKENS
        }
        self._further = _further_special_tokens(config)
        #: One template, several by name, or None. May be set.
        self.chat_template: str | dict[str, str] | None = _chat_template(config)
        self.model_max_length = config.get("model_max_length") or int(1e30)
        _add_missing(backend, config, self.all_special_tokens)

    def __repr__(self) -> str:
        return display.call(
            "Tokenizer", [("name_or_path", self.name_or_path), ("vocab_size", len(self))]
        )

    # -- text to tokens --------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_attention_mask: bool | None = None,
        return_offsets_mapping: bool = False,
        **others: Any,
    ) -> Encoded:
        """
        The ids of one text or of several texts.

        Args:
            text: A text, or a list of texts.
            add_special_tokens: Whether to add what the model expects around a text, such as BOS.
            return_attention_mask: False leaves out the mask, which is all ones.
            return_offsets_mapping: Whether to return where in the text each token is.
            others: Arguments of transformers, with values that have no effect.

        Returns:
            A mapping with `input_ids`: a list, or a list for each text.

        Example:
            ids = tokenizer("Who are you?")["input_ids"]
        """
        reject_unsupported("tokenizer()", others)
        texts = [text] if isinstance(text, str) else list(text)
        if any(not isinstance(each, str) for each in texts):
            raise TypeError("tokenizer() takes a text or a list of texts.")
        found = self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        columns: dict[str, list[Any]] = {"input_ids": [list(each.ids) for each in found]}
        if return_attention_mask is not False:
            columns["attention_mask"] = [list(each.attention_mask) for each in found]
        if return_offsets_mapping:
            columns["offset_mapping"] = [list(each.offsets) for each in found]
        if isinstance(text, str):
            return Encoded({name: column[0] for name, column in columns.items()})
        return Encoded(columns)

    def encode(self, text: str, *, add_special_tokens: bool = True, **others: Any) -> list[int]:
        """
        The ids of a text.

        Args:
            text: The text.
            add_special_tokens: Whether to add what the model expects around a text, such as BOS.
            others: Arguments of transformers, with values that have no effect.

        Returns:
            The ids.

        Example:
            ids = tokenizer.encode("Who are you?", add_special_tokens=False)
        """
        reject_unsupported("encode()", others)
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def tokenize(self, text: str, *, add_special_tokens: bool = False, **others: Any) -> list[str]:
        """
        The tokens of a text, as texts of the vocabulary.

        Args:
            text: The text.
            add_special_tokens: Whether to add what the model expects around a text, such as BOS.
            others: Arguments of transformers, with values that have no effect.

        Returns:
            The tokens.

        Example:
            tokens = tokenizer.tokenize("Who are you?")
        """
        reject_unsupported("tokenize()", others)
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).tokens)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """
        The id of one token or of several.

        Args:
            tokens: A token, or a list of tokens. Unknown ones get the id of `unk_token`.

        Returns:
            An id, or a list of ids.

        Example:
            token_id = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
        """
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    # -- tokens to text --------------------------------------------------------------------------

    @overload
    def decode(
        self, token_ids: Sequence[int] | int, skip_special_tokens: bool = ..., **others: Any
    ) -> str: ...
    @overload
    def decode(
        self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool = ..., **others: Any
    ) -> list[str]: ...
    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, **others: Any
    ) -> str | list[str]:
        """
        The text of a list of ids, or of several lists.

        Args:
            token_ids: An id, a list of ids, or a list of lists.
            skip_special_tokens: Whether to leave out special tokens, such as the end of text.
            others: Arguments of transformers, with values that have no effect.

        Returns:
            A text, or a list of texts.

        Example:
            text = tokenizer.decode(tokenizer.encode("Ahoy!"), skip_special_tokens=True)
        """
        reject_unsupported("decode()", others)
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, int):
            ids = [ids]
        elif len(ids) and isinstance(ids[0], Sequence):
            return [self.decode(each, skip_special_tokens) for each in ids]
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **others: Any
    ) -> list[str]:
        """
        The text of each list of ids.

        Args:
            sequences: Lists of ids.
            skip_special_tokens: Whether to leave out special tokens, such as the end of text.
            others: Arguments of transformers, with values that have no effect.

        Returns:
            The texts.

        Example:
            texts = tokenizer.batch_decode([[1, 2], [3]])
        """
        return [self.decode(ids, skip_special_tokens, **others) for ids in sequences]

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = ...) -> str | None: ...
    @overload
    def convert_ids_to_tokens(
        self, ids: Sequence[int], skip_special_tokens: bool = ...
    ) -> list[str | None]: ...
    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """
        The token of one id or of several, as texts of the vocabulary.

        Args:
            ids: An id, or a list of ids.
            skip_special_tokens: Whether to leave out special tokens.

        Returns:
            A token, or a list of tokens; None for an id that does not exist.

        Example:
            tokens = tokenizer.convert_ids_to_tokens([1, 2, 3])
        """
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        left_out = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend.id_to_token(int(each)) for each in ids if int(each) not in left_out]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """
        The text of tokens of the vocabulary.

        Args:
            tokens: The tokens.

        Returns:
            The text.

        Example:
            text = tokenizer.convert_tokens_to_string(tokenizer.tokenize("Ahoy!"))
        """
        decoder = self.backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))

    # -- the vocabulary --------------------------------------------------------------------------

    def get_vocab(self) -> dict[str, int]:
        """
        The id of each token, including added tokens.

        Returns:
            A new dict.

        Example:
            count = len(tokenizer.get_vocab())
        """
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        """
        The id of each added token, such as special tokens.

        Returns:
            A new dict, in the order of the ids.

        Example:
            added = tokenizer.get_added_vocab()
        """
        added = self.backend.get_added_tokens_decoder()
        return {added[token_id].content: token_id for token_id in sorted(added)}

    def __len__(self) -> int:
        """Number of ids, including added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """Number of ids without added tokens, as in transformers. `len()` includes them."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {name: token for name, token in self._named.items() if token is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        """Each special token once, named ones first."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self._further]))

    @property
    def all_special_ids(self) -> list[int]:
        found = map(self.backend.token_to_id, self.all_special_tokens)
        return [token_id for token_id in found if token_id is not None]

    # -- conversations ---------------------------------------------------------------------------

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool | str = ...,
        tokenize: Literal[True] = ...,
        *,
        return_dict: Literal[False] = ...,
        **variables: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool | str = ...,
        *,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...
    @overload
    def apply_chat_template(self, conversation: Any, **variables: Any) -> Any: ...
    def apply_chat_template(
        self,
        conversation: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        *,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """
        Render a conversation with the chat template of the model.

        Args:
            conversation: Messages with `role` and `content`, or several conversations.
            tools: Tools that the model may call, as JSON schemas.
            documents: Documents for the model.
            chat_template: A template, or the name of one. None: that of the model.
            add_generation_prompt: Whether to end with the start of the model's answer.
            continue_final_message: Whether the model continues the last message.
            tokenize: Whether to return ids; else text.
            return_dict: Whether to return a mapping, as transformers 5 does.
            variables: More variables of the template.

        Returns:
            Ids, a text, or a mapping; a list of them for several conversations.

        Raises:
            TokenizerError: The model has no chat template.

        Example:
            chat = [{"role": "user", "content": "Who are you?"}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        """
        variables = reject_unsupported("apply_chat_template()", variables, others=True)
        if continue_final_message and add_generation_prompt:
            raise TokenizerError(
                "continue_final_message continues the last message, add_generation_prompt starts a "
                "new one. Use only one of them."
            )
        several = bool(conversation) and isinstance(conversation[0], (list, tuple))
        template = self.get_chat_template(chat_template, tools)
        texts = [
            render(
                template,
                each,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self.special_tokens_map, **variables},
            )
            for each in (conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        # The template itself writes special tokens such as BOS.
        encoded = self(texts if several else texts[0], add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """
        The template for a conversation.

        Args:
            chat_template: A template, or the name of one. None: the default of the model.
            tools: Tools, if there are any: some models have another template for them.

        Returns:
            The template, in the language of Jinja.

        Raises:
            TokenizerError: The model has no chat template.

        Example:
            template = tokenizer.get_chat_template()
        """
        known = self.chat_template
        if isinstance(known, dict):
            name = chat_template or ("tool_use" if tools and "tool_use" in known else "default")
            if name in known:
                return known[name]
            if chat_template is None:
                raise TokenizerError(
                    "This model has several chat templates and no default. Set chat_template to "
                    f"one of {', '.join(sorted(known))}."
                )
        template = chat_template or known
        if not isinstance(template, str):
            raise TokenizerError(
                "This model's folder has no chat template: it is a base model, or the template is "
                "missing. Pass one as chat_template=..., or encode() the text yourself."
            )
        return template


def reject_unsupported(
    where: str, given: Mapping[str, Any], *, others: bool = False
) -> dict[str, Any]:
    """Refuses arguments that are not implemented. With `others`, returns unknown arguments."""
    left = {}
    for name, value in given.items():
        if name not in NEUTRAL_ARGUMENTS and others:
            left[name] = value
        elif name not in NEUTRAL_ARGUMENTS or not any(
            value is each or value == each for each in NEUTRAL_ARGUMENTS[name]
        ):
            raise TypeError(
                f"{where}: {name}={value!r} is not implemented by this tokenizer, but by that of "
                "transformers. Run pip install transformers; get_tokenizer() then returns it."
            )
    return left


def _content(token: Any) -> str | None:
    """The text of a token. transformers writes tokens with options as objects."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _further_special_tokens(config: Mapping[str, Any]) -> list[str]:
    """Special tokens without a name."""
    found = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(name) or []
        listed = listed.values() if isinstance(listed, Mapping) else listed
        found += [token for token in map(_content, listed) if token is not None]
    return found


def _chat_template(config: Mapping[str, Any]) -> str | dict[str, str] | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return {entry["name"]: entry["template"] for entry in template}
    return template if isinstance(template, str) else None


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Sequence[str]
) -> None:
    """Adds tokens that only the config lists as special, as transformers does."""
    with needs("A tokenizer"):
        from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            known.add(entry["content"])
            backend.add_tokens([AddedToken(**entry)])
    new = [token for token in special if token not in known]
    if new:
        backend.add_special_tokens([AddedToken(token, special=True) for token in new])

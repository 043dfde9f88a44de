"""
Loads the tokenizer of a model. Heavy packages are imported only when one is loaded.

A model's folder, or its files in the Hugging Face cache, are enough; no network is needed. If
transformers is installed, its tokenizer class is used, as programs written for the official client
expect. Otherwise the tinkex class is used, which needs only `tokenizers`. Code that comes with a
model runs only at the revisions in `PINNED`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinkex.client.errors import TinkerError
from tinkex.extras import MissingExtra, needs

log = logging.getLogger("tinkex.tokenizer")

#: Models whose tokenizer is code in their repository, pinned to a revision that was reviewed.
PINNED = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}
LLAMA_MIRROR = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",  # names the tokenizer class if tokenizer_config.json does not
)


#: Models that use the tokenizer of another model.
SAME_AS = {"moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5"}
#: Prefixes of tokenizers that are not on the hub.
PRIVATE = ("TML/", "thinkingmachines/")


class TokenizerUnavailable(TinkerError, RuntimeError):
    """No tokenizer was found; the message says what was tried."""


def tokenizer_id_of(model_name: str, tokenizer_id: str | None) -> str:
    """The location of a model's tokenizer: from the server, else by a naming rule. Pure."""
    if tokenizer_id and os.path.isabs(tokenizer_id):
        return tokenizer_id  # a folder, whose path may contain a colon
    if tokenizer_id:
        found = tokenizer_id.partition(":")[0]
    else:
        # A suffix after ":" names a variant of the model, and so does a third path segment.
        name = model_name.partition(":")[0]
        mirrored = name.startswith("meta-llama/Llama-3")  # the original is gated
        found = LLAMA_MIRROR if mirrored else "/".join(name.split("/")[:2])
    return SAME_AS.get(found, found)


@functools.lru_cache(maxsize=32)
def load(model_name: str, tokenizer_id: str | None = None, *, light: bool = False) -> Any:
    """
    The tokenizer of a model, cached for the process.

    `light` prefers the tinkex class, which gives the same tokens: the import of transformers takes
    seconds, which a command does not have.
    """
    found = tokenizer_id_of(model_name, tokenizer_id)
    if not found:
        raise TokenizerUnavailable("The server named neither the model nor its tokenizer.")
    folder = Path(found) if Path(found).is_dir() else None
    if folder is None and found.startswith(PRIVATE) and (private := _private(found)) is not None:
        return private
    try:
        with needs("A tokenizer"):
            import tokenizers  # noqa: F401 (before anything is downloaded)
    except MissingExtra as error:
        raise TokenizerUnavailable(str(error)) from error
    if folder is not None:
        return _from_folder(folder, model_name, light=light)
    tried: list[str] = []
    for look in (_from_hub_cache, _embedded, _from_hub):
        folder = look(found, tried)
        if folder is not None and (folder / "tokenizer.json").is_file():
            return _from_folder(folder, model_name, light=light)
        if folder is not None:
            # It has files, but no tokenizer.json: it is code, or an older format.
            return _from_transformers(found, tried)
    raise _unavailable(found, tried)


def _unavailable(found: str, tried: list[str]) -> TokenizerUnavailable:
    return TokenizerUnavailable(
        f"No tokenizer for {found!r}. Tried: {'; '.join(tried)}. Download it once with network "
        "access, or use a model whose folder is on this machine: a TrainingClient's "
        "get_tokenizer() asks the server, which may know one."
    )


def _from_folder(folder: Path, model_name: str, *, light: bool) -> Any:
    """The tokenizer in a folder: of transformers if that is installed, else of tinkex."""
    from tinkex.models.tokenizer import TokenizerError, load_tokenizer

    has_file = (folder / "tokenizer.json").is_file()
    if light and has_file:
        with contextlib.suppress(TokenizerError):  # transformers may know this one
            return load_tokenizer(folder, name=model_name or None)
    if _is_installed("transformers") and has_file:
        try:
            with needs("Its tokenizer"):
                from transformers import AutoTokenizer
            theirs = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 (from three libraries; the fallback may work)
            log.warning(
                "transformers cannot read the tokenizer in %s (%s); tinkex reads its "
                "tokenizer.json itself",
                folder,
                _first_line(error),
            )
        else:
            # The model's name, not its folder: programs choose their chat format by it.
            theirs.name_or_path = model_name or str(folder)
            return theirs
    try:
        return load_tokenizer(folder, name=model_name or None)
    except TokenizerError as error:
        raise TokenizerUnavailable(str(error)) from error


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # None in sys.modules, or a module without a spec
        return False


def _private(name: str) -> Any:
    """A tokenizer from its vendor's package; None if the package does not have it."""
    try:
        module = importlib.import_module("tml_tokenizers.tinker_tokenizers")
    except ImportError as error:
        raise TokenizerUnavailable(
            f"The tokenizer {name!r} is not public: it is part of the package tml_tokenizers, "
            "which is not installed. Install it, or build prompts with tml-renderers, from PyPI."
        ) from error
    return module.get_tinker_tokenizer(name)


def _from_hub_cache(name: str, tried: list[str]) -> Path | None:
    from tinkex.models.resolve import hub_cache

    cache = hub_cache(os.environ)
    tried.append(f"the Hugging Face cache in {cache} (not found)")
    repository = cache / f"models--{name.replace('/', '--')}"
    revision = PINNED.get(name)
    if revision is None and (main := repository / "refs" / "main").is_file():
        revision = main.read_text().strip()
    snapshots = repository / "snapshots"
    if revision is not None and (snapshots / revision / "tokenizer.json").is_file():
        return snapshots / revision
    if name in PINNED:
        return None  # another revision is other code
    found = sorted(snapshots.glob("*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def _embedded(name: str, tried: list[str]) -> Path | None:
    from tinkex.models.embedded import ensure_embedded
    from tinkex.models.resolve import DEFAULT_MODEL

    return ensure_embedded() if name == DEFAULT_MODEL else None


def _from_hub(name: str, tried: list[str]) -> Path | None:
    try:
        with needs("The hub"):
            from huggingface_hub import snapshot_download
    except MissingExtra as error:
        tried.append(f"the hub ({error})")
        return None
    try:
        return Path(snapshot_download(name, revision=PINNED.get(name), allow_patterns=list(FILES)))
    except Exception as error:  # noqa: BLE001 (missing, unreachable, forbidden: in the message)
        tried.append(f"the hub ({_first_line(error)})")
        return None


def _from_transformers(name: str, tried: list[str]) -> Any:
    """For models without a tokenizer.json. A model's own code runs only at pinned revisions."""
    try:
        with needs(f"{name!r} has no tokenizer.json, so its tokenizer"):
            from transformers import AutoTokenizer
    except MissingExtra as error:
        raise TokenizerUnavailable(str(error)) from error
    pinned = {"revision": PINNED[name], "trust_remote_code": True} if name in PINNED else {}
    try:
        return AutoTokenizer.from_pretrained(name, use_fast=True, **pinned)
    except (OSError, ValueError, ImportError) as error:
        tried.append(f"transformers ({_first_line(error)})")
        raise _unavailable(name, tried) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class TextMixin(ABC):
    """`encode` and `decode` with the tokenizer of the client's model, fetched once."""

    @abstractmethod
    def get_tokenizer(self) -> Any:
        """
        The tokenizer of the base model.

        Returns:
            The tokenizer of transformers if that is installed, else a light one of tinkex.

        Example:
            tokenizer = training.get_tokenizer()
        """

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return self.get_tokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """
        The tokens of a text. The first call asks the server for the tokenizer.

        Args:
            text: The text.
            add_special_tokens: Whether to add what the model expects around a text, such as BOS.

        Returns:
            The token ids.

        Example:
            tokens = training.encode("Who are you?")
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """
        The text of tokens.

        Args:
            token_ids: The ids, such as `SampledSequence.tokens`.
            skip_special_tokens: Whether to leave out special tokens, such as the end of text.

        Returns:
            The text.

        Example:
            print(training.decode([1, 2, 3], skip_special_tokens=True))
        """
        ids = [int(token) for token in token_ids]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

"""
What a server says when it is ready: one line for programs, a banner for people.

The web process knows the facts and sends them to the supervisor as JSON; the command line prints them.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from tinkex.wire.text_format import memory_text

#: Any key that begins with `tml-` works on a server without keys; official clients require one.
ANY_KEY = "tml-local"
#: Width of the labels of the banner.
LABEL = 8


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A base model. Without a device it is not loaded yet."""

    name: str
    context: int | None = None
    #: How many engines it has.
    replicas: int = 1
    #: The devices of all of them; the rest is that of one.
    device: str = ""
    dtype: str = ""
    memory_used_bytes: int = 0
    memory_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the web process knows when it is ready."""

    models: Sequence[LoadedModel] = ()
    #: Whether clients need an API key.
    needs_keys: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        values["models"] = [LoadedModel(**model) for model in values["models"]]
        return cls(**values)


def ready_line(url: str) -> str:
    """The line for programs; they compare it literally."""
    return f"tinkex ready at {url}"


def banner(url: str, folder: Path, facts: Facts, *, home: Path | None = None) -> str:
    """The text for people. Begins with the line for programs."""
    rows = [*_model_rows(facts.models), ("data", _short(folder, home or Path.home()))]
    if facts.needs_keys:
        rows += [("keys", "on: clients need a key; `tinkex key create` makes one")]
        key = "tml-...   # your key"
    else:
        rows += [("keys", "off: every program on this machine has access")]
        key = ANY_KEY
    rows += [("status", f"{url}/")]
    return "\n".join(
        (
            ready_line(url),
            "",
            *(f"  {label:<{LABEL}}{text}" for label, text in rows),
            "",
            "  To use it from another terminal, with tinkex or the official SDK:",
            f"    export TINKER_BASE_URL={shlex.quote(url)}",
            f"    export TINKER_API_KEY={key}",
            "",
            "  Press Ctrl-C to stop. Unfinished work continues at the next start.",
            "",
        )
    )


def _model_rows(models: Sequence[LoadedModel]) -> Iterator[tuple[str, str]]:
    for model in models:
        many = model.replicas > 1
        yield "model", model.name + (f" ({model.replicas} replicas)" if many else "")
        context = "" if model.context is None else f"context of {model.context:,} tokens"
        if not model.device:
            parts = (context, "loads when it is first used")
            yield "", ", ".join(part for part in parts if part)
            continue
        yield "", ", ".join(part for part in (model.device, model.dtype, context) if part)
        memory = memory_text(
            used=model.memory_used_bytes, limit=model.memory_bytes, total=model.device_bytes
        )
        yield "", f"memory: {memory}" + (" for each replica" if many else "")


def _short(folder: Path, home: Path) -> str:
    """The folder with `~` for the home folder."""
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)

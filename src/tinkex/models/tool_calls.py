"""
Tool calls in the text of a model: which format a chat template uses, and the calls in an answer.

    Hermes, Qwen   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them
    Llama 3        the whole answer is {"name": "add", "parameters": {"a": 1}}
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any


class ToolFormat(enum.Enum):
    """How a model writes a call."""

    HERMES = "hermes"
    LLAMA = "llama"

    @property
    def arguments_key(self) -> str:
        return "arguments" if self is ToolFormat.HERMES else "parameters"


OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: What Llama may write before a call; decoding usually leaves it out as a special token.
PYTHON_TAG = "<|python_tag|>"


def renders_tools(template: str) -> bool:
    """Whether a chat template shows tools to the model."""
    return "tools" in template


def tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None if it is none of these."""
    if OPEN in template:
        # Some models write XML between the tags instead of JSON.
        return None if "<function=" in template else ToolFormat.HERMES
    if '"parameters"' in template and "ipython" in template:
        return ToolFormat.LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wants to be made."""

    name: str
    #: A JSON object, as text.
    arguments: str


class ToolCallReader:
    """
    Separates the calls in an answer from its text, as the text arrives.

    What looks like a call and is none stays text: nothing that the model wrote is lost.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._held = ""
        #: Whether there was a call; of a Llama: whether the answer is text.
        self._called = self._is_text = False

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certainly no part of a call, and the calls that are complete."""
        self._held += text
        if self._format is ToolFormat.LLAMA:
            return self._add_llama()
        shown: list[str] = []
        calls: list[ToolCall] = []
        while (at := self._held.find(OPEN)) >= 0:
            # White space before a call is part of the format.
            shown.append(self._take(len(self._held[:at].rstrip())))
            end = self._held.find(CLOSE)
            if end < 0:
                return "".join(shown), calls
            whole = self._take(end + len(CLOSE))
            found = _calls(whole.strip()[len(OPEN) : -len(CLOSE)], self._format)
            if found is None:
                shown.append(whole)
            else:
                self._called = True
                calls += found
        shown.append(self._take(len(self._held) - _held_back(self._held)))
        return "".join(shown), calls

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is left when the answer is complete."""
        held = self._take(len(self._held))
        begun = held.strip()
        if self._called and not begun:
            return "", []
        if self._format is ToolFormat.HERMES and not begun.startswith(OPEN):
            return held, []
        calls = _calls(begun.removeprefix(OPEN).removeprefix(PYTHON_TAG), self._format)
        return ("", calls) if calls else (held, [])

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _add_llama(self) -> tuple[str, list[ToolCall]]:
        """An answer that begins like a call is held back until its end."""
        begun = self._held.lstrip()
        is_call = not begun or begun[0] == "{" or PYTHON_TAG.startswith(begun[: len(PYTHON_TAG)])
        if is_call and not self._is_text:
            return "", []
        self._is_text = True
        return self._take(len(self._held)), []


def _held_back(text: str) -> int:
    """How many characters at the end may be the beginning of a call, or white space before it."""
    longest = min(len(text), len(OPEN) - 1)
    begun = next((size for size in range(longest, 0, -1) if text.endswith(OPEN[:size])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())


def _calls(text: str, format: ToolFormat) -> list[ToolCall] | None:
    """The calls in a text of one or more JSON objects; None if it has anything else."""
    decoder, calls = json.JSONDecoder(), []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
            call = _call(value, format)
        except (ValueError, RecursionError):  # the latter for JSON that is nested too deeply
            return None
        if call is None:
            return None
        calls.append(call)
        # Llama separates several calls by semicolons.
        rest = rest[end:].lstrip("; \t\r\n")
    return calls or None


def _call(value: Any, format: ToolFormat) -> ToolCall | None:
    """The call in a JSON value; None if it is none. Raises what `json` raises."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    # Models mix up the two names.
    found = value.get(format.arguments_key, value.get("parameters", value.get("arguments")))
    if isinstance(found, str):
        found = json.loads(found)
    if not isinstance(found, dict) and found is not None:
        return None
    return ToolCall(value["name"], json.dumps(found or {}, ensure_ascii=False))


def call_schema(name: str, parameters: Any, format: ToolFormat) -> dict[str, Any]:
    """The JSON schema of a call to one function."""
    schema = parameters if isinstance(parameters, dict) and parameters else {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, format.arguments_key: schema},
        "required": ["name", format.arguments_key],
        "additionalProperties": False,
    }

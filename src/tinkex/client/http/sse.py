"""
Decodes server-sent events from bytes that arrive in arbitrary pieces.

Follows the event-stream rules of the HTML standard. `EventDecoder` is pure; `EventStream` reads a
response with it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

# Not `str.splitlines`: that also splits at characters that JSON may contain.
_LINE_END = re.compile("\r\n|\n|\r")
#: Longer numbers (30 million years in milliseconds) are ignored: `int` refuses very long ones.
_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream."""

    #: The kind of event; None if the server does not name it, which means "message".
    event: str | None = None
    data: str = ""
    #: The last id the server gave, by this event or an earlier one.
    id: str | None = None
    #: Milliseconds to wait before connecting again, if this event says so.
    retry: int | None = None

    def json(self) -> Any:
        return json.loads(self.data)


class EventDecoder:
    """Takes bytes in arbitrary pieces and returns the completed events."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        #: The last piece ended in a carriage return; a following line feed belongs to it.
        self._after_return = False
        self._line: list[str] = []
        self._last_id: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._event: str | None = None
        self._data: list[str] = []
        self._retry: int | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """
        Return the events that this piece completes.

        An event without its final blank line is dropped, so there is no call for the end.
        """
        text = self._text.decode(chunk)
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\ufeff")
        if text and self._after_return:
            self._after_return = False
            text = text.removeprefix("\n")
        if not text:
            return []
        self._after_return = text.endswith("\r")
        first, *rest = _LINE_END.split(text)
        self._line.append(first)
        if not rest:
            return []
        lines = ["".join(self._line), *rest]
        self._line = [lines.pop()]
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._complete()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._event = value or None
            case "data":
                self._data.append(value)
            case "id" if "\0" not in value:
                self._last_id = value or None
            case "retry" if _NUMBER.fullmatch(value):
                self._retry = int(value)
            case _:  # a comment (no name), or an unknown field
                pass
        return None

    def _complete(self) -> ServerSentEvent | None:
        event = None
        if self._data:
            data = "\n".join(self._data)
            event = ServerSentEvent(self._event, data, self._last_id, self._retry)
        self._clear()
        return event


class Consumed(RuntimeError):
    """A stream that can be read only once was read again."""


class EventStream:
    """The events of a response whose body is still arriving. Can be read once."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._begun = False

    def __aiter__(self) -> AsyncIterator[ServerSentEvent]:
        if self._begun:
            raise Consumed(
                "The events of this stream have already been read, and a stream can be read only "
                "once. Keep what you need while reading, or send the request again."
            )
        self._begun = True
        return self._read()

    async def _read(self) -> AsyncIterator[ServerSentEvent]:
        decoder = EventDecoder()
        async for chunk in self._chunks:
            for event in decoder.feed(chunk):
                yield event

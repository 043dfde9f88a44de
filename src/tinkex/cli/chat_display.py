"""How `tinkex chat` shows an answer while it is generated: words, notes, and notices of the client."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.cells import cell_len

from tinkex.cli.output import printable


class WordWrap:
    """
    Breaks lines between words, in a text that arrives in pieces.

    A word is held back until it is complete, because it may not fit into its line. Wide characters,
    as in Chinese, are words of their own.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        #: Where the next character goes, if nothing is held back.
        self.column = 0
        self._space = self._word = ""

    def add(self, text: str) -> str:
        """What can be shown now."""
        return "".join(map(self._next, text))

    def end(self) -> str:
        """What was held back. The next text begins a new line."""
        shown = self._take_word()
        self._space, self.column = "", 0
        return shown

    def _next(self, char: str) -> str:
        if char == "\n":
            shown = self._take_word() + char
            self._space, self.column = "", 0
            return shown
        if char.isspace():
            shown = self._take_word()
            self._space += char
            return shown
        shown = ""
        if cell_len(char) > 1 or cell_len(self._word) >= self._width:
            shown = self._take_word()
        self._word += char
        return shown

    def _take_word(self) -> str:
        space, word = self._space, self._word
        if not word:
            return ""
        self._space = self._word = ""
        if self.column and self.column + cell_len(space + word) > self._width:
            space = "\n"
            self.column = 0
        self.column += cell_len(word) + (0 if space == "\n" else cell_len(space))
        return space + word


class Screen:
    """Shows answers on standard output, and notes on lines of their own on standard error."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._wrap = WordWrap(shutil.get_terminal_size().columns)
        # Notices come from the thread of the client.
        self._lock = threading.Lock()

    def show(self, text: str) -> None:
        """Show more of the answer."""
        if self._is_terminal:
            # What a model says must not control a terminal.
            with self._lock:
                self._write(self._wrap.add(printable(text)))
        else:
            self._write(text)

    def end(self) -> None:
        """The answer is over; on a terminal, an empty line follows."""
        with self._lock:
            self._end_line()
            self._write("\n")
            self._wrap = WordWrap(shutil.get_terminal_size().columns)

    def note(self, text: str) -> None:
        """Say something on a line of its own."""
        with self._lock:
            self._end_line()
            click.echo(text, err=True)

    def break_off(self) -> None:
        """The answer failed; the error comes next."""
        with self._lock:
            self._end_line()

    def _end_line(self) -> None:
        has_begun = self._wrap.column > 0
        if (rest := self._wrap.end()) or has_begun:
            self._write(f"{rest}\n")

    @contextmanager
    def notices(self) -> Iterator[None]:
        """Show what the client logs, such as that it waits, as notes while a block runs."""
        handler = _Notices(self)
        logger = logging.getLogger("tinkex")
        if self._is_terminal:
            logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def _write(self, text: str) -> None:
        click.echo(text, nl=False)
        sys.stdout.flush()


class _Notices(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.note(self.format(record))

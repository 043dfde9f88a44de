"""Streams of samples while a cluster is under faults: each has all of its tokens, once and in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tinkex
from serving import TINY
from tinkex import types

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=96, seed=11, temperature=1.0)


class Streams:
    """Reads one stream after the other in a thread of its own."""

    def __init__(self, url: str) -> None:
        service = tinkex.ServiceClient(base_url=url, api_key="tml-any-key-will-do")
        self._sampling = service.create_sampling_client(base_model=TINY)
        #: What every stream must have: the sample has a seed.
        self._expected = self._read()
        self.whole = 0
        self.violations: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streams", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                found = self._read()
            except tinkex.TinkerError as error:
                self.violations.append(f"stream {self.whole}: {type(error).__name__}: {error}")
                continue
            if found == self._expected:
                self.whole += 1
            else:
                self.violations.append(f"stream {self.whole}: {found}, not {self._expected}")

    def _read(self) -> list[int]:
        """The tokens in the order in which they came."""
        with self._sampling.sample_stream(PROMPT, 1, PARAMS) as stream:
            return [token for event in stream for token in event.tokens]

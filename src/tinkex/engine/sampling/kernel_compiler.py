"""Compiles GPU kernels in the background, so that running requests do not wait for a compiler.

Kernels are compiled by running a step whose results nobody reads. Before the first of them, the
fast path decodes a few tokens, and its logits must equal those of the original model. If they do
not, sampling goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from tinkex.engine.device import is_device_lost
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.original_decoder import StepDecoder
from tinkex.engine.model.start_check import TOLERANCE, check_logits

log = logging.getLogger(__name__)

#: The key of the comparison with the original model. Without it no fast path is used.
COMPARISON = "comparison"


class KernelCompiler:
    def __init__(self, model: BaseModel, decoder: StepDecoder) -> None:
        self._model, self._decoder = model, decoder
        self._thread = ThreadPoolExecutor(1, "tinkex-kernels")
        self._compiling: tuple[Hashable, Future[None]] | None = None
        self._compiled: set[Hashable] = set()
        #: What could not be compiled, and is done by other code.
        self.refused: set[Hashable] = set()
        #: For tests and benchmarks: wait for the compiler.
        self.waits = False

    @property
    def usable(self) -> bool:
        """Whether the fast path can be used at all. Starts the comparison with the original."""
        return self.ready(COMPARISON, self._compare)

    def ready(self, key: Hashable, step: Callable[[], object]) -> bool:
        """Whether the kernels of `step` are compiled. Starts to compile them if nothing else is."""
        if key in self._compiled:
            return True
        if key in self.refused:
            return False
        self._finish()
        if self._compiling is None and key not in self._compiled and key not in self.refused:
            self._compiling = (key, self._thread.submit(self._run, step))
            if self.waits:
                self._finish()
        return key in self._compiled

    @property
    def busy(self) -> bool:
        """Whether a step runs in the background: a graph that is recorded now might catch it."""
        self._finish()
        return self._compiling is not None

    def refuse(self, key: Hashable, error: Exception) -> None:
        """Other code does this from now on. Raises if the device is lost."""
        if is_device_lost(error):
            raise error
        self.refused.add(key)
        self._compiled.discard(key)
        what = "decode steps are no CUDA graphs" if key == COMPARISON else f"no fast path for {key}"
        log.warning("%s; sampling is slower", what, exc_info=error)

    def _finish(self) -> None:
        if self._compiling is None:
            return
        key, future = self._compiling
        if self.waits:
            wait([future])
        if not future.done():
            return
        self._compiling = None
        try:
            future.result()
        except Exception as error:  # noqa: BLE001  a compiler may raise anything
            self.refuse(key, error)
        else:
            self._compiled.add(key)

    def _run(self, step: Callable[[], object]) -> None:
        stream = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(stream):
            step()
            stream.synchronize()

    def _compare(self) -> None:
        ids, expected_V = self._model.probed
        found_V = self._decoder.probe_logits(ids)
        check_logits(found_V, expected_V, TOLERANCE[self._model.dtype])
        log.info("decode steps are CUDA graphs from now on")

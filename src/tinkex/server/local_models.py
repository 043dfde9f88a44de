"""
Models that programs add to a local server while it runs.

A program with `base_url="local"` may name any model; the server that it finds may serve another one.
The added models of a data folder are remembered: later local servers serve them too, and continue
their runs. Loading happens on first use, so this costs nothing until then.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tinkex.durable_files import write_file
from tinkex.models.cache import line_progress
from tinkex.models.resolve import ModelNotFound, ModelSource, describe, resolve
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import EngineRefused, ServedModel
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.wire.engine_settings import EngineSettings

log = logging.getLogger("tinkex.server.local_models")

FILE = "local-models.json"


class CannotAdd(Exception):
    """The model was not added; the text says why, and what to do."""


def served_model(source: ModelSource) -> ServedModel:
    facts = describe(source)
    return ServedModel(
        name=source.name,
        folder=source.folder,
        arch=facts.arch,
        max_context_length=facts.max_context_length,
    )


def with_remembered(served: Sequence[ServedModel], folder: Path) -> list[ServedModel]:
    """The given models, and those that earlier local servers of this data folder had."""
    found = {model.name: model for model in served}
    for name, place in _read(folder).items():
        if name in found:
            continue
        try:
            found[name] = served_model(ModelSource(name=name, folder=Path(place)))
        except (ModelNotFound, OSError) as error:
            log.warning("%s is no longer served: %s", name, error)
    remember(found.values(), folder)
    return list(found.values())


def remember(models: Iterable[ServedModel], folder: Path) -> None:
    """Write the models that later local servers of this data folder have."""
    places = {model.name: str(model.folder) for model in models}
    if places != _read(folder):
        write_file(folder / FILE, json.dumps(places, indent=2).encode())


def _read(folder: Path) -> dict[str, str]:
    try:
        told = json.loads((folder / FILE).read_text())
        return {str(name): str(place) for name, place in told.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s is ignored: %s", folder / FILE, error)
        return {}


class LocalModels:
    """Adds models to the running server."""

    def __init__(
        self,
        executor: LocalExecutor,
        folder: Path,
        engine_settings: Callable[[ServedModel], EngineSettings],
    ) -> None:
        self._executor = executor
        self._folder = folder
        self._engine_settings = engine_settings
        self._adding = asyncio.Lock()

    async def add(self, spec: str, scheduler: Scheduler) -> ServedModel:
        """Serve a NAME, FOLDER or NAME=FOLDER, and load it. CannotAdd if that is not possible."""
        async with self._adding:
            model = await asyncio.to_thread(_find, spec)
            same = next((one for one in self._executor.served if one.name == model.name), None)
            if same is not None and same.folder != model.folder:
                raise CannotAdd(
                    f"{model.name} is served from {same.folder} here, and not from {model.folder}. "
                    "Give the other one another name: NAME=FOLDER."
                )
            if same is None:
                self._executor.add(model, self._engine_settings(model))
                scheduler.add_model(model)
            try:
                await self._executor.ready(model.name)
            except EngineRefused as refused:
                if same is None:
                    await self._executor.remove(model.name)
                raise CannotAdd(
                    f"{model.name} cannot be loaded beside {_names(self._executor.served)}: "
                    f"{refused} `tinkex stop` ends this server; the next one loads only what its "
                    "programs use."
                ) from refused
            await asyncio.to_thread(remember, self._executor.served, self._folder)
            if same is None:
                log.info("a program added the model %s (%s)", model.name, model.folder)
            return model


def _find(spec: str) -> ServedModel:
    try:
        progress = line_progress(sys.stderr)
        # Advice for a program with base_url="local", which does not start `tinkex serve` itself.
        return served_model(resolve(spec, progress=progress, serve_with="TINKEX_LOCAL_MODEL="))
    except ModelNotFound as error:
        raise CannotAdd(str(error)) from error


def _names(models: Sequence[ServedModel]) -> str:
    return ", ".join(model.name for model in models) or "nothing"

"""
Models that programs add to a local server while it runs.

A program with `base_url="local"` may name any model; the server that it finds may serve another one.
Models that were loaded once are remembered in the data folder: later local servers serve them too,
and continue their runs. Loading happens on first use, so this costs nothing until then.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from tinkex.durable_files import write_file
from tinkex.models.cache import line_progress
from tinkex.models.resolve import ModelNotFound, ModelSource, describe, resolve
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import EngineKilled, EngineRefused, ServedModel
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.server.scheduler.scheduler_port import SchedulerPort
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
    """The given models, and those that earlier local servers of this data folder loaded."""
    found = {model.name: model for model in served}
    for name, place in remembered(folder).items():
        if name in found:
            continue
        try:
            found[name] = served_model(ModelSource(name=name, folder=Path(place)))
        except (ModelNotFound, OSError) as error:
            # It stays in the file: its disk may be back at the next start.
            log.warning("%s is not served now: %s", name, error)
    return list(found.values())


def remembered(folder: Path) -> dict[str, str]:
    """The models that local servers of this data folder loaded, and their folders."""
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
        executor.on_loaded = self._remember

    async def add(self, spec: str, scheduler: SchedulerPort) -> ServedModel:
        """Serve a NAME, FOLDER or NAME=FOLDER, and load it. CannotAdd if that is not possible."""
        model = await asyncio.to_thread(_find, spec)
        same = next((one for one in self._executor.served if one.name == model.name), None)
        if same is not None and same.folder != model.folder:
            raise CannotAdd(
                f"{model.name} is served from {same.folder} here, and not from {model.folder}. "
                "Give the other one another name: NAME=FOLDER."
            )
        if same is None:
            self._executor.add(model, self._engine_settings(model))
            cast(Scheduler, scheduler).placement.add_model(model)
            log.info("a program adds the model %s (%s)", model.name, model.folder)
        try:
            await self._executor.load(model.name)
        except EngineKilled as stopping:
            raise CannotAdd(f"{model.name} was not loaded: {stopping}.") from stopping
        except EngineRefused as refused:
            if model.name not in remembered(self._folder):
                await self._executor.remove(model.name)
            others = [one.name for one in self._executor.served if one.name != model.name]
            raise CannotAdd(
                f"{model.name} cannot be loaded beside {', '.join(others) or 'nothing'}: "
                f"{refused.text} `tinkex stop` ends this server; the next one loads only "
                "what its programs use."
            ) from refused
        return model

    def processes(self, model: ServedModel) -> list[int]:
        """The process ids of its engines that run."""
        found = (self._executor.process_id(engine) for engine in model.engines)
        return [process for process in found if process is not None]

    def _remember(self, name: str) -> None:
        """The model was loaded: later local servers of this data folder serve it too."""
        places = remembered(self._folder)
        for model in self._executor.served:
            if model.name == name and places.get(name) != str(model.folder):
                places[name] = str(model.folder)
                try:
                    write_file(self._folder / FILE, json.dumps(places, indent=2).encode())
                except OSError as error:
                    log.warning("later local servers will not serve %s: %s", name, error)


def _find(spec: str) -> ServedModel:
    try:
        progress = line_progress(sys.stderr)
        # Advice for a program with base_url="local", which does not start `tinkex serve` itself.
        return served_model(resolve(spec, progress=progress, serve_with="TINKEX_LOCAL_MODEL="))
    except ModelNotFound as error:
        raise CannotAdd(str(error)) from error

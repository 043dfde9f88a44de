"""
Checks that a base model is still the one its runs were trained on.

An adapter on other base weights gives wrong numbers without any error. So the files of every served
model are hashed when the server starts, and again whenever an engine has restarted, in a background
thread. Each run stores the hash of its base model. Requests of a run with another hash are refused;
new runs, and runs of other base models, are not affected. Only requests that need the hash wait for
it.
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tinkex.models.content_hash import Stopped, changed_parts, content_hash
from tinkex.server.executor import ServedModel
from tinkex.server.store import StorageError, Store
from tinkex.wire.errors import UserFailure

log = logging.getLogger("tinkex.server.scheduler.base_model_check")

#: In the data folder: hashes of files, so that a restart does not read them again.
CACHE_FILE = "base-hashes.json"
#: The duration of hashing is logged if it is longer than this.
SLOW_HASH_S = 1.0


class BaseModelChanged(UserFailure):
    """The base model of a run or checkpoint has changed."""


class BaseModelChecks:
    """The checks of all served base models. Call `start` before requests run, `close` after."""

    def __init__(
        self, store: Store, served: Sequence[ServedModel], *, folder: Path, accept: bool
    ) -> None:
        # Its own thread: hashing gigabytes must not delay other file work.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tinkex-base-hash")
        self._stop = threading.Event()
        self._new = functools.partial(
            BaseModelCheck,
            store,
            cache_file=folder / CACHE_FILE,
            accept=accept,
            pool=self._pool,
            stop=self._stop,
        )
        self._checks = {model.name: self._new(model) for model in served}

    def get(self, base_model: str) -> "BaseModelCheck | None":
        return self._checks.get(base_model)

    def add(self, model: ServedModel) -> "BaseModelCheck":
        """Check one more model, that a running server was given."""
        check = self._checks[model.name] = self._new(model)
        check.start()
        return check

    def start(self) -> None:
        for check in self._checks.values():
            check.start()

    async def close(self) -> None:
        self._stop.set()
        await asyncio.gather(*(check.close() for check in self._checks.values()))
        self._pool.shutdown()


class BaseModelCheck:
    """The check of one base model."""

    def __init__(
        self,
        store: Store,
        served: ServedModel,
        *,
        cache_file: Path,
        accept: bool,
        pool: ThreadPoolExecutor,
        stop: threading.Event,
    ) -> None:
        self._store = store
        self._name = served.name
        self._folder = served.folder
        self._cache_file = cache_file
        self._accept = accept
        self._pool = pool
        self._stop = stop
        #: The engine incarnations that the files were hashed for.
        self._incarnations: set[int] = set()
        #: The task that hashes the files. Its result is None if the files could not be hashed.
        self._hashing: asyncio.Task[str | None] | None = None
        #: Whether all stored runs of this base model have the current hash.
        self._all_match = False
        #: How many runs with another hash the last warning reported, to log each number once.
        self._refused = 0

    def start(self) -> None:
        self._hashing = asyncio.create_task(self._hash())

    async def close(self) -> None:
        if self._hashing is not None:
            self._hashing.cancel()
            await asyncio.gather(self._hashing, return_exceptions=True)

    async def wait_if_needed(self, model_id: str) -> None:
        """Wait for the hash if this run needs it. Called before the run takes a training slot."""
        if self._hashing is None or self._hashing.done():
            return
        if await self._store.base_hashes.of_run(model_id) is not None:
            await asyncio.shield(self._hashing)

    async def check_run(self, model_id: str, incarnation: int) -> None:
        """Raise `BaseModelChanged` unless this engine has the base model of the run."""
        self._hash_again_after_restart(incarnation)
        if self._hashing is None:
            return
        expected = await self._store.base_hashes.of_run(model_id)
        if expected is not None:
            self._compare("run", expected, await asyncio.shield(self._hashing))
        elif self._hashing.done() and (found := await self._hashing) is not None:
            # A new run. If the hash is still being computed, `_hash` stores it when it is known.
            self._store.base_hashes.fill_run(model_id, found)

    async def check_version(self, version_id: str, incarnation: int | None = None) -> None:
        """Like `check_run`, for a checkpoint: compares the hash of the run that saved it."""
        self._hash_again_after_restart(incarnation)
        if self._hashing is None or self._all_match:
            return
        expected = await self._store.base_hashes.of_version(version_id)
        if expected is not None:
            self._compare("checkpoint", expected, await asyncio.shield(self._hashing))

    def _hash_again_after_restart(self, incarnation: int | None) -> None:
        """Hash again after an engine restart: the engine has read the files again."""
        if incarnation is None or incarnation in self._incarnations:
            return
        if self._hashing is not None and self._hashing.done():
            self._incarnations.add(incarnation)
            self._all_match = False
            self._hashing = asyncio.create_task(self._hash())

    def _compare(self, what: str, expected: str, found: str | None) -> None:
        if found is None or expected == found:
            return
        parts = " and ".join(changed_parts(expected, found)) or "content"
        raise BaseModelChanged(
            f"the base model {self._name} has changed since this {what} was made: its {parts} "
            f"differ, so the results would differ too. Nothing was done. Serve the earlier files "
            f"under this name again, or start the server with --accept-changed-base to continue "
            f"with the new ones; new runs on {self._name} are not affected."
        )

    async def _hash(self) -> str | None:
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._pool,
                lambda: content_hash(self._folder, self._cache_file, stopped=self._stop.is_set),
            )
            took_s = time.monotonic() - began_s
            if took_s > SLOW_HASH_S:
                log.info("hashed the files of %s in %.1f s", self._name, took_s)
            if found is not None:
                await self._update_runs(found)
        except (OSError, StorageError, Stopped) as error:
            if not self._stop.is_set():
                log.warning(
                    "cannot check whether the files of base model %s have changed: %s",
                    self._name,
                    error,
                )
            return None
        return found

    async def _update_runs(self, found: str) -> None:
        """Store the hash for runs that have none, and log how many runs have another hash."""
        others = await self._store.base_hashes.fill(self._name, found)
        if others and self._accept:
            await self._store.base_hashes.replace(self._name, found)
            log.warning(
                "the files of base model %s have changed: %d runs that were trained on the earlier "
                "files continue with the new files, because of --accept-changed-base; their results "
                "will differ",
                self._name,
                others,
            )
        elif others and others != self._refused:
            log.warning(
                "the files of base model %s have changed: steps and samples of %d runs that were "
                "trained on the earlier files are refused. New runs are served. To continue those "
                "runs, serve the earlier files under this name again, or start the server with "
                "--accept-changed-base to use the new files",
                self._name,
                others,
            )
        self._refused = others
        self._all_match = self._accept or not others

"""
Whether a base model is still the one that runs were made on.

An adapter on other weights gives other numbers, and nothing shows it. So the content of every served
folder is hashed at the start, and again whenever its engine has started anew, in a thread beside
everything else. Runs remember the hash. One that was made on another content is refused; new runs and
runs of other base models go on. Only what needs the hash waits for it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tinkex.models.content_hash import Stopped, changed_parts, content_hash
from tinkex.server.executor import ServedModel
from tinkex.server.store import StorageError, Store
from tinkex.wire.errors import UserFailure

log = logging.getLogger("tinkex.server.scheduler.base_model_check")

#: In the data folder: hashes of files, so that a restart does not read them again.
CACHE_FILE = "base-hashes.json"
#: A look that takes longer is worth a line in the log.
LONG_S = 1.0


class BaseChanged(UserFailure):
    """A run, or a checkpoint, whose base model is another one now."""


@dataclass(slots=True)
class _Base:
    folder: Path
    #: The engine that was last looked for.
    incarnation: int | None = None
    #: Ends with the hash, or None where there is none.
    look: asyncio.Task[str | None] | None = None
    #: No run that is kept was made on another content.
    agreed: bool = False
    #: Runs that were, as the log says.
    refused: int = 0


class BaseCheck:
    """`start` before work is taken up, `close` after."""

    def __init__(
        self, store: Store, served: Sequence[ServedModel], *, folder: Path, accept: bool
    ) -> None:
        self._store = store
        self._cache_file = folder / CACHE_FILE
        self._accept = accept
        self._bases = {model.name: _Base(model.folder) for model in served}
        # Of its own: gigabytes must not hold up other work with files.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tinkex-base-hash")
        self._stop = threading.Event()

    def start(self) -> None:
        for name, base in self._bases.items():
            base.look = asyncio.create_task(self._look(name, base))

    async def close(self) -> None:
        self._stop.set()
        looks = [base.look for base in self._bases.values() if base.look is not None]
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        self._pool.shutdown()

    async def known(self, model_id: str, base_model: str) -> None:
        """Wait for the hash if this run will be compared with it; before it takes a place."""
        base = self._bases.get(base_model)
        if base is None or base.look is None or base.look.done():
            return
        if await self._store.base_hashes.of_run(model_id) is not None:
            await asyncio.shield(base.look)

    async def check_run(self, model_id: str, base_model: str, incarnation: int) -> None:
        """`BaseChanged` unless this engine has the content that the run was made on."""
        base = self._seen(base_model, incarnation)
        if base is None or base.look is None:
            return
        made_on = await self._store.base_hashes.of_run(model_id)
        if made_on is not None:
            self._compare("run", base_model, made_on, await asyncio.shield(base.look))
        elif base.look.done() and (found := await base.look) is not None:
            # A new run. While the look goes on it is left to that.
            self._store.base_hashes.fill_run(model_id, found)

    async def check_version(
        self, version_id: str, base_model: str, incarnation: int | None = None
    ) -> None:
        """The same for a checkpoint, by the run that saved it."""
        base = self._seen(base_model, incarnation)
        if base is None or base.look is None or base.agreed:
            return
        made_on = await self._store.base_hashes.of_version(version_id)
        if made_on is not None:
            self._compare("checkpoint", base_model, made_on, await asyncio.shield(base.look))

    def _seen(self, base_model: str, incarnation: int | None) -> _Base | None:
        """The state of a base model; a new engine has read the folder anew, so it is looked at."""
        base = self._bases.get(base_model)
        if base is None or incarnation is None or incarnation == base.incarnation:
            return base
        if base.look is not None and base.look.done():
            base.incarnation = incarnation
            base.agreed = False
            base.look = asyncio.create_task(self._look(base_model, base))
        return base

    def _compare(self, what: str, base_model: str, made_on: str, found: str | None) -> None:
        if found is None or made_on == found:
            return
        parts = " and ".join(changed_parts(made_on, found)) or "content"
        raise BaseChanged(
            f"the base model {base_model} has changed since this {what} was made: its {parts} "
            f"differ from then, so the numbers would be others. Nothing was done. Serve the earlier "
            f"files under this name again, or start the server with --accept-changed-base to go on "
            f"with the new ones; new runs on {base_model} are not affected."
        )

    async def _look(self, name: str, base: _Base) -> str | None:
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._pool,
                lambda: content_hash(base.folder, self._cache_file, stopped=self._stop.is_set),
            )
            return await self._note(name, base, found, took_s=time.monotonic() - began_s)
        except (OSError, StorageError, Stopped) as error:
            if not self._stop.is_set():
                log.warning("whether %s has changed cannot be told: %s", name, error)
            return None

    async def _note(
        self, name: str, base: _Base, found: str | None, *, took_s: float
    ) -> str | None:
        if took_s > LONG_S:
            log.info("hashed the files of %s in %.1f s", name, took_s)
        if found is None:
            return None
        others = await self._store.base_hashes.fill(name, found)
        if others and self._accept:
            await self._store.base_hashes.replace(name, found)
            log.warning(
                "%s has changed: %d runs that were made on other files go on with these, as "
                "--accept-changed-base says; their numbers will be others",
                name,
                others,
            )
        elif others and others != base.refused:
            log.warning(
                "%s has changed: steps and samples of %d runs that were made on other files are "
                "refused. New runs are served. Serve the earlier files under this name again, or "
                "start with --accept-changed-base to go on with these",
                name,
                others,
            )
        base.refused = others
        base.agreed = self._accept or not others
        return found

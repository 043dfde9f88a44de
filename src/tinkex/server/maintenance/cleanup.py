"""
Cleanup: deletes data after its retention time. A periodic task runs it in small steps.

Every step is one transaction, then the deletion of files that only its rows referred to. If the
process is killed in between, a later run deletes those files as orphans.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinkex.server.retry import Backoff, PeriodicTask
from tinkex.server.scheduler.result_waiters import Futures
from tinkex.server.settings import GIGABYTE, Settings
from tinkex.server.store import StorageError, Store
from tinkex.server.store.retention import CheckpointName

log = logging.getLogger("tinkex.server.maintenance.cleanup")

# The pause between two steps of a run, so that requests are not delayed.
PAUSE_S = 0.01
# How often files are checked for orphans.
ORPHAN_CHECK_S = 1800.0
# Models of a session that was inactive for this long get a snapshot.
INACTIVE_S = 900.0
SNAPSHOTS_PER_PASS = 4
# When to retry a failed snapshot.
SNAPSHOT_BACKOFF = Backoff(first_s=600.0, max_s=86_400.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutoffs:
    """Points in time: older data may be deleted."""

    fetched_s: float
    unfetched_s: float
    inactive_s: float
    abandoned_s: float
    fallback_s: float
    orphan_s: float
    telemetry_s: float
    audit_s: float
    metrics_s: float


def cutoffs(settings: Settings, *, now_s: float) -> Cutoffs:
    """The cutoffs of the settings at this moment."""
    return Cutoffs(
        fetched_s=now_s - settings.result_kept_s,
        unfetched_s=now_s - settings.unfetched_kept_s,
        inactive_s=now_s - max(INACTIVE_S, settings.session_grace_s),
        abandoned_s=now_s - settings.abandoned_s,
        fallback_s=now_s - settings.way_back_s,
        orphan_s=now_s - settings.orphan_s,
        telemetry_s=now_s - settings.telemetry_kept_s,
        audit_s=now_s - settings.audit_kept_s,
        metrics_s=now_s - settings.metrics_kept_s,
    )


def over_keep_last(names: Iterable[CheckpointName], *, keep_last: int) -> list[CheckpointName]:
    """The checkpoints beyond the newest `keep_last` of each run and kind, except published ones."""
    by_kind: defaultdict[tuple[str, str], list[CheckpointName]] = defaultdict(list)
    for name in names:
        by_kind[name.model_id, name.kind].append(name)
    gone = []
    for group in by_kind.values():
        group.sort(key=lambda name: name.saved_s, reverse=True)
        gone += [name for name in group[keep_last:] if not name.public]
    return gone


class TakesSnapshots(Protocol):
    async def snapshot(self, model_id: str) -> bool: ...


class Cleanup:
    """The cleanup task. Belongs to one event loop; call `start` first, `close` last."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        scheduler: TakesSnapshots,
        futures: Futures,
        homes: Callable[[], Sequence[str] | None] = lambda: None,
        base_model: str | None = None,
        is_first: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Among several processes of a database, one `is_first`: it deletes what belongs to all.

        Each makes snapshots of the models of its `homes` and its base model; None is all models.
        """
        self._homes, self._base_model, self._is_first = homes, base_model, is_first
        self._settings = settings
        self._store = store
        self._scheduler = scheduler
        self._futures = futures
        self._clock = clock
        self._orphans_checked_s = float("-inf")
        #: Models whose snapshot failed -> when to retry (monotonic clock), and the failures so far.
        self._retry_at: dict[str, tuple[float, int]] = {}
        self._task = PeriodicTask()

    def start(self) -> None:
        if self._settings.janitor_s > 0:
            self._task.start(self._run, self._settings.janitor_s, what="the cleanup", log=log)

    async def close(self) -> None:
        await self._task.close()

    async def _run(self) -> None:
        try:
            await self.run_once()
        except StorageError as error:
            log.info("the cleanup was skipped because of a storage problem: %s", error)

    async def run_once(self) -> None:
        """Run all steps of the cleanup once."""
        until = cutoffs(self._settings, now_s=self._clock())
        await self._snapshot_inactive_models(until)
        if self._is_first():
            await self._drop_expired(until)
        await self._trim_cache()

    async def _drop_expired(self, until: Cutoffs) -> None:
        retention = self._store.retention
        await retention.drop_older_snapshots(before_s=until.fallback_s)
        while dropped := await retention.drop_results(
            fetched_before_s=until.fetched_s,
            unfetched_before_s=until.unfetched_s,
            abandoned_before_s=until.abandoned_s,
        ):
            self._futures.forget(dropped)
            await asyncio.sleep(PAUSE_S)
        await retention.drop_events(
            # The events of deleted results are not needed.
            completions_before_s=min(until.fetched_s, until.unfetched_s),
            telemetry_before_s=until.telemetry_s,
            audit_before_s=until.audit_s,
        )
        await self._drop_steps(until)
        await self._drop_checkpoints(until)
        await retention.drop_snapshots(abandoned_before_s=until.abandoned_s)
        if time.monotonic() - self._orphans_checked_s >= min(
            ORPHAN_CHECK_S, self._settings.orphan_s
        ):
            self._orphans_checked_s = time.monotonic()
            if deleted := await retention.delete_orphans(before_s=until.orphan_s):
                log.info("deleted %d orphaned files and folders", deleted)
        while pages := await retention.free_pages():
            log.debug("freed %d pages of the database", pages)
            await asyncio.sleep(PAUSE_S)

    async def _snapshot_inactive_models(self, until: Cutoffs) -> None:
        """Snapshot models of inactive sessions, so that their logs can be deleted."""
        if (homes := self._homes()) is not None and not homes:
            return
        inactive = await self._store.retention.models_without_snapshot(
            inactive_before_s=until.inactive_s,
            abandoned_before_s=until.abandoned_s,
            homes=homes,
            base_model=self._base_model,
            limit=(limit := SNAPSHOTS_PER_PASS + len(self._retry_at)),
        )
        if len(inactive) < limit:  # these are all: forget models that need no snapshot any more
            self._retry_at = {one: self._retry_at[one] for one in inactive if one in self._retry_at}
        now_s = time.monotonic()
        due = [one for one in inactive if self._retry_at.get(one, (now_s, 0))[0] <= now_s]
        for model_id in due[:SNAPSHOTS_PER_PASS]:
            if await self._scheduler.snapshot(model_id):
                self._retry_at.pop(model_id, None)
            else:
                # Its engine may be restarting, or the snapshot may never succeed.
                failures = self._retry_at.get(model_id, (now_s, 0))[1] + 1
                wait_s = SNAPSHOT_BACKOFF.wait_s(failures) or 0.0
                self._retry_at[model_id] = (now_s + wait_s, failures)

    async def _drop_steps(self, until: Cutoffs) -> None:
        retention = self._store.retention
        for model_id in await retention.runs_with_old_steps(
            before_s=until.metrics_s, abandoned_before_s=until.abandoned_s
        ):
            while dropped := await retention.drop_steps(model_id):
                log.debug("deleted %d steps of the run %s", dropped, model_id)
                await asyncio.sleep(PAUSE_S)

    async def _drop_checkpoints(self, until: Cutoffs) -> None:
        retention = self._store.retention
        await retention.drop_expired_names(now_s=self._clock())
        keep_last = self._settings.keep_last
        if keep_last > 0:
            await retention.drop_names(
                over_keep_last(
                    await retention.names_over_limit(keep_last=keep_last), keep_last=keep_last
                )
            )
        await retention.drop_versions(abandoned_before_s=until.abandoned_s)

    async def _trim_cache(self) -> None:
        retention = self._store.retention
        self._store.checkpoints.clear_open_cache()
        limit_bytes = int(self._settings.cache_gb * GIGABYTE)
        if gone := await retention.trim_cache(limit_bytes=limit_bytes, now_s=self._clock()):
            self._store.checkpoints.forget_copies(gone)
            log.info("deleted %d local copies of folders in the object store", len(gone))

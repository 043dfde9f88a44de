"""
Save and load steps: checkpoint names, versions, quotas and samplers.

The engine reads and writes the files; everything else about a checkpoint is decided here.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex.server.executor import WorkFailed
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.retry import Backoff, retry
from tinkex.server.scheduler.base_model_check import BaseModelCheck
from tinkex.server.store import Model, OverQuota, Sampler, Store, Version
from tinkex.server.store.age_encryption import check_recipients, encrypt_files
from tinkex.server.store.checkpoints import NameTaken, Naming, SamplerTaken
from tinkex.server.store.storage_health import FILES, os_error_in, storage_problem
from tinkex.wire.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    tinker_path,
)
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto.frames_pb2 import Done, Load, Order, Save
from tinkex.wire.sdk_versions import SdkVersion

log = logging.getLogger("tinkex.server.scheduler.checkpoints")

TRAINING = "weights"
SAMPLER = "sampler_weights"
EXTERNAL = "external_weights"

MAX_NAME_BYTES = 200
MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600
# For a save that fails because the disk is full. The wait doubles, because each attempt may fill the
# disk for a moment. Then the save fails.
DISK_BACKOFF = Backoff(first_s=2.0, max_s=16.0, within_s=600.0)

RunOrder = Callable[[Order], Awaitable[Done]]


class CheckpointSteps:
    """Runs `save_weights`, `save_weights_for_sampler`, `save_weights_external` and `load_weights`."""

    def __init__(self, store: Store, base_check: BaseModelCheck | None = None) -> None:
        self._store = store
        self.base_check = base_check

    async def save(
        self, model: Model, step: QueuedRequest, payload: bytes, run: RunOrder
    ) -> Outcome:
        """Write the files. The commit of the outcome makes them a checkpoint."""
        if step.kind is Kind.SAVE_WEIGHTS:
            return await self._save_training(model, step, payload, run)
        if step.kind is Kind.SAVE_EXTERNAL:
            return await self._save_external(model, step, payload, run)
        request = decode_json(SaveWeightsForSamplerRequest, payload)
        if request.path is None:
            return await self._save_unnamed(model, step, request, run)
        result = encode_json(
            SaveWeightsForSamplerResponseInternal(
                path=tinker_path(model.model_id, SAMPLER, request.path),
                type="save_weights_for_sampler",
            )
        )
        naming = _naming(request.ttl_seconds, request.user_metadata, overwrite=False)
        return await self._save_named(model, step, SAMPLER, request.path, naming, result, run)

    async def load(
        self, model: Model, payload: bytes, run: RunOrder, *, version_id: str | None
    ) -> Outcome:
        """Load a checkpoint: this version, or the present one of its path."""
        request = decode_json(LoadWeightsRequest, payload)
        version = await self._version(model, request.path, version_id)
        refuse_external(version)
        if self.base_check is not None:
            await self.base_check.check_version(version.version_id)
        if version.kind != TRAINING and request.optimizer:
            raise UserFailure(
                f"{request.path} was saved for sampling and holds no optimizer state. "
                "Load it without the optimizer, or load a checkpoint made by save_state."
            )
        folder = await self._store.checkpoints.open(version.version_id, required=True)
        load = Load(model_id=model.model_id, folder=folder, optimizer=bool(request.optimizer))
        await run(Order(load=load))
        result = LoadWeightsResponse(
            path=request.path, model_id=model.model_id, type="load_weights"
        )
        return Outcome(result=encode_json(result), version_id=version.version_id)

    async def _version(self, model: Model, path: str, version_id: str | None) -> Version:
        checkpoints = self._store.checkpoints
        if version_id is not None:
            version = await checkpoints.version(version_id)
        else:
            version = await checkpoints.find(path, readers=[model.owner])
        if version is None:
            raise UserFailure(no_checkpoint(path))
        source = await self._store.models.model(version.model_id)
        if source is not None and source.base_model != model.base_model:
            raise UserFailure(
                f"{path} is an adapter of {source.base_model} and does not fit this model, which "
                f"is {model.base_model}. Create the model on {source.base_model}."
            )
        return version

    async def _save_training(
        self, model: Model, step: QueuedRequest, payload: bytes, run: RunOrder
    ) -> Outcome:
        request = decode_json(SaveWeightsRequest, payload)
        # Old clients may save without a name; the step's number is unique in the run.
        name = request.path if request.path is not None else f"{step.seq_id:06d}"
        path = tinker_path(model.model_id, TRAINING, name)
        result = encode_json(SaveWeightsResponse(path=path, type="save_weights"))
        naming = _naming(request.ttl_seconds, request.user_metadata, overwrite=request.overwrite)
        return await self._save_named(model, step, TRAINING, name, naming, result, run)

    async def _save_external(
        self, model: Model, step: QueuedRequest, payload: bytes, run: RunOrder
    ) -> Outcome:
        """Save files for other programs, encrypted if keys were given."""
        request = decode_json(SaveWeightsExternalRequest, payload)
        check_name(request.path)
        recipients = request.age_encryption_recipients or []
        check_recipients(recipients)
        naming = _naming(request.ttl_seconds, None, overwrite=False)
        checkpoints = self._store.checkpoints
        if await self._is_taken(model, EXTERNAL, request.path):
            raise UserFailure(_name_taken(model, EXTERNAL, request.path))
        await self._refuse_over_quota(model, checkpoints=1)
        version = checkpoints.new_version(
            owner=model.owner, model_id=model.model_id, kind=EXTERNAL, name=request.path
        )
        folder = Path(checkpoints.folder(version))
        # Plaintext is written under a hidden name, so it cannot be downloaded before encryption.
        written = folder.with_name(f".{folder.name}.open") if recipients else folder
        save = Save(model_id=model.model_id, folder=str(written))
        done = await self._run_with_disk_retry(run, save)
        size_bytes: int = json.loads(done.result)["size_bytes"]
        if recipients:
            size_bytes = await asyncio.to_thread(encrypt_files, written, folder, recipients)
        path = tinker_path(model.model_id, EXTERNAL, request.path)
        result = encode_json(
            SaveWeightsExternalResponseInternal(
                path=path, size_bytes=size_bytes, type="save_weights_external"
            )
        )
        version = version.with_size(size_bytes)
        return self._named_outcome(model, step, version, naming, result)

    async def _save_named(
        self,
        model: Model,
        step: QueuedRequest,
        kind: str,
        name: str,
        naming: Naming,
        result: bytes,
        run: RunOrder,
    ) -> Outcome:
        check_name(name)
        taken = await self._is_taken(model, kind, name)
        if taken and not naming.overwrite:
            raise UserFailure(_name_taken(model, kind, name))
        await self._refuse_over_quota(model, checkpoints=int(not taken))
        version = await self._write_version(model, kind, name, run)
        return self._named_outcome(model, step, version, naming, result)

    async def _is_taken(self, model: Model, kind: str, name: str) -> bool:
        """Checked before the work to fail early; the commit checks again and decides."""
        checkpoints = self._store.checkpoints
        return await checkpoints.is_taken(model_id=model.model_id, kind=kind, name=name)

    async def _refuse_over_quota(self, model: Model, *, checkpoints: int) -> None:
        """Check the quotas of the owner before the work to fail early; the commit checks again."""
        quotas, owner = self._store.quotas, model.owner
        await self._store.quotas.within(
            owner, lambda: quotas.refuse_save(owner, checkpoints=checkpoints)
        )

    def _outcome(
        self,
        version: Version,
        step: QueuedRequest,
        result: bytes,
        refusals: Mapping[type[Exception], str],
        *,
        naming: Naming | None = None,
        sampler: tuple[Sampler, int] | None = None,
    ) -> Outcome:
        """The outcome of a save; its commit deletes the files if the version is refused."""
        checkpoints = self._store.checkpoints
        outcome = Outcome(result=result, version_id=version.version_id)

        async def commit() -> None:
            written = await checkpoints.store_files(version)
            try:
                await self._store.quotas.within(
                    version.owner,
                    lambda: checkpoints.save(
                        version,
                        fingerprint=written,
                        request=step,
                        outcome=outcome,
                        naming=naming,
                        sampler=sampler,
                    ),
                )
            except (OverQuota, NameTaken, SamplerTaken) as refused:
                await checkpoints.discard(version)
                if (text := refusals.get(type(refused))) is not None:
                    raise UserFailure(text) from None
                raise

        return replace(outcome, commit=commit)

    def _named_outcome(
        self, model: Model, step: QueuedRequest, version: Version, naming: Naming, result: bytes
    ) -> Outcome:
        taken = _name_taken(model, version.kind, version.name or "")
        return self._outcome(version, step, result, {NameTaken: taken}, naming=naming)

    async def _save_unnamed(
        self,
        model: Model,
        step: QueuedRequest,
        request: SaveWeightsForSamplerRequest,
        run: RunOrder,
    ) -> Outcome:
        number = request.sampling_session_seq_id
        if number is None or number < 0:
            raise UserFailure(
                "save_weights_for_sampler needs a `path` (a name for the checkpoint) or a "
                "`sampling_session_seq_id` (a number, from 0, for the sampler it makes)."
            )
        session = await self._store.sessions.session(model.session_id)
        dialect = SdkVersion.of(session.sdk_version if session else None)
        await self._refuse_over_quota(model, checkpoints=0)
        version = await self._write_version(model, SAMPLER, None, run)
        path = tinker_path(model.model_id, SAMPLER, f".{version.version_id}")
        sampler = Sampler(
            sampling_session_id=f"{model.session_id}:sample:{number}",
            owner=model.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            version_id=version.version_id,
            model_path=path,
        )
        result = encode_json(
            SaveWeightsForSamplerResponseInternal(
                path=path if dialect.unnamed_sampler_save_has_path else None,
                sampling_session_id=sampler.sampling_session_id,
                type="save_weights_for_sampler",
            )
        )
        taken = (
            f"sampling_session_seq_id {number} of session {model.session_id} is taken by another "
            "sampler. Use the next free number."
        )
        return self._outcome(
            version, step, result, {SamplerTaken: taken}, sampler=(sampler, number)
        )

    async def _write_version(
        self, model: Model, kind: str, name: str | None, run: RunOrder
    ) -> Version:
        """The engine writes the files; they are not visible until the commit."""
        checkpoints = self._store.checkpoints
        version = checkpoints.new_version(
            owner=model.owner, model_id=model.model_id, kind=kind, name=name
        )
        folder = checkpoints.folder(version)
        save = Save(model_id=model.model_id, folder=folder, optimizer=kind == TRAINING)
        done = await self._run_with_disk_retry(run, save)
        return version.with_size(json.loads(done.result)["size_bytes"])

    async def _run_with_disk_retry(self, run: RunOrder, save: Save) -> Done:
        """Run a save; retry while the disk is full. Only the first failure is logged."""
        waiting_since_s: float | None = None

        def should_retry(failed: Exception) -> bool:
            nonlocal waiting_since_s
            if not isinstance(failed, WorkFailed):
                return False
            error = os_error_in(failed.message)
            if (problem := storage_problem(error)) is not None and waiting_since_s is None:
                waiting_since_s = time.monotonic()
                # Only the first failure makes the server refuse new data: there may be enough
                # space for everything except this save.
                self._store.health.record(error, FILES)
                log.error(
                    "a save of %s waits up to %.0f s: %s. %s",
                    *(save.model_id, DISK_BACKOFF.within_s, failed.message, problem.advice),
                )
            return problem is not None

        def log_end(how: str) -> None:
            if waiting_since_s is not None:
                waited_s = time.monotonic() - waiting_since_s
                log.warning("the save of %s %s after %.0f s", save.model_id, how, waited_s)

        try:
            done = await retry(
                lambda: run(Order(save=save)), DISK_BACKOFF, should_retry=should_retry
            )
        except WorkFailed:
            log_end("failed")
            raise
        log_end("was written")
        return done


def check_name(name: str) -> None:
    """Refuse names that cannot be a folder and a part of a path."""
    problem = None
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        problem = f"it has {len(name.encode())} bytes, and 1 to {MAX_NAME_BYTES} are allowed"
    elif "/" in name or "\\" in name or not name.isprintable():
        problem = "slashes and control characters are not allowed"
    elif name.startswith("."):
        problem = "it must not begin with a dot"
    if problem:
        raise UserFailure(
            f"checkpoint name {name[:80]!r} cannot be used: {problem}. "
            "Letters, digits, `-`, `_` and `.` always work."
        )


def no_checkpoint(path: str) -> str:
    return (
        f"there is no checkpoint {path}: it was never saved, was deleted, has expired, or belongs "
        "to another owner. Paths are tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME."
    )


def refuse_external(version: Version) -> None:
    """Refuse to load files that were made for other programs: they may be encrypted."""
    if version.kind == EXTERNAL:
        raise UserFailure(
            f"{tinker_path(version.model_id, EXTERNAL, version.name or '')} was made for other "
            "programs and cannot be loaded or sampled from here. Use a checkpoint made by "
            "save_state or save_weights_for_sampler."
        )


def check_ttl(ttl_s: int | None) -> None:
    """Refuse a time to live that is out of range."""
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise UserFailure(
            f"ttl_seconds is {ttl_s}; {MIN_TTL_S} (one hour) to {MAX_TTL_S} (ten years) "
            "are allowed. Leave it out to keep the checkpoint."
        )


def _naming(ttl_s: int | None, user_metadata: dict[str, Any] | None, *, overwrite: bool) -> Naming:
    check_ttl(ttl_s)
    return Naming(
        overwrite=overwrite,
        expires_s=None if ttl_s is None else time.time() + ttl_s,
        user_metadata=user_metadata,
    )


def _name_taken(model: Model, kind: str, name: str) -> str:
    advice = " Save with overwrite=True to replace it, or" if kind == TRAINING else " Please"
    return f"{tinker_path(model.model_id, kind, name)} already exists.{advice} choose another name."

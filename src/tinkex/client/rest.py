"""RestClient: lists, inspects and changes runs, checkpoints, sessions and samplers."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from tinkex.client import user_warnings, validation
from tinkex.client.admin import AdminClient, redirected
from tinkex.client.connection import Connection
from tinkex.client.errors import APIStatusError, ExperimentalWarning
from tinkex.client.futures import Promise, awaits
from tinkex.client.http.retry import NotYet, retrying
from tinkex.client.http.transport import Kind
from tinkex.client.rest_base import Page, Pages, Sessionless, by_offset, sdk_headers
from tinkex.client.validation import (
    AccessScope,
    AuditEvents,
    checkpoint_at,
    checkpoint_url,
    segment,
)
from tinkex.tracebacks import public_edge
from tinkex.wire.billing import (
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)
from tinkex.wire.checkpoints import (
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.wire.client_config import WhoamiResponse
from tinkex.wire.sampling import GetSamplerResponse
from tinkex.wire.sessions import (
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionSummary,
    TraceExportResponse,
    TrainingRun,
    TrainingRunsResponse,
)

log = logging.getLogger("tinkex.rest")

#: A trace takes seconds at least: one early poll, then the interval that services expect.
FIRST_TRACE_POLL_S = 0.5
TRACE_POLL_S = 5.0
ORGANIZATION_PREFIX = "tml:organization:"
#: Lifetime of a link if the service does not say.
ARCHIVE_LINK_TTL = timedelta(minutes=15)


@public_edge
class RestClient(Sessionless):
    """
    Access to runs and checkpoints on the service, without a session.

        rest = tinkex.RestClient()
        for run in rest.all_training_runs():
            print(run.training_run_id, run.base_model)
        await rest.publish_checkpoint_from_tinker_path_async("tinker://RUN/weights/NAME")

    Every method returns a future immediately; its `_async` variant returns the value. Invalid
    arguments raise `ValueError` immediately, before anything is sent.
    """

    # -- training runs ---------------------------------------------------------------------------

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> Promise[TrainingRun]:
        """One run: its base model, its adapter, its last checkpoints."""
        return self._get_run("get_training_run", training_run_id, access_scope)

    def _get_run(
        self, name: str, training_run_id: str, access_scope: AccessScope
    ) -> Promise[TrainingRun]:
        return self._ask(
            name,
            "GET",
            f"training_runs/{segment('training_run_id', training_run_id)}",
            answer=TrainingRun,
            query={"access_scope": validation.scope(access_scope)},
            about=f"looking up run {training_run_id}",
        )

    get_training_run_async = awaits(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> Promise[TrainingRun]:
        """The run that a checkpoint was saved from."""
        run, _ = checkpoint_at(tinker_path)
        return self._get_run("get_training_run_by_tinker_path", run, access_scope)

    get_training_run_by_tinker_path_async = awaits(get_training_run_by_tinker_path)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Promise[WeightsInfoResponse]:
        """What is needed to create a model that can load a checkpoint."""
        checkpoint_at(tinker_path)
        return self._ask(
            "get_weights_info_by_tinker_path",
            "POST",
            "weights_info",
            WeightsInfoRequest(tinker_path=tinker_path),
            answer=WeightsInfoResponse,
            about=f"looking up {tinker_path}",
        )

    get_weights_info_by_tinker_path_async = awaits(get_weights_info_by_tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Promise[TrainingRunsResponse]:
        """A page of runs, newest first."""
        return self._ask(
            "list_training_runs",
            "GET",
            "training_runs",
            answer=TrainingRunsResponse,
            query={
                **validation.page(limit, offset),
                "access_scope": validation.scope(access_scope),
                "project_id": project_id,
            },
            about="listing training runs",
        )

    list_training_runs_async = awaits(list_training_runs)

    def all_training_runs(
        self, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Pages[TrainingRun]:
        """Every run, newest first: `for` or `async for`."""
        validation.scope(access_scope)
        return by_offset(
            lambda limit, offset: self.list_training_runs(limit, offset, access_scope, project_id),
            lambda found: found.training_runs,
            lambda run: run.training_run_id,
            size=100,
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: str) -> Promise[CheckpointsListResponse]:
        """All checkpoints of a run."""
        return self._ask(
            "list_checkpoints",
            "GET",
            f"training_runs/{segment('training_run_id', training_run_id)}/checkpoints",
            answer=CheckpointsListResponse,
            about=f"listing the checkpoints of {training_run_id}",
        )

    list_checkpoints_async = awaits(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> Promise[CheckpointsListResponse]:
        """A page of all checkpoints, newest first."""
        return self._ask(
            "list_user_checkpoints",
            "GET",
            "checkpoints",
            answer=CheckpointsListResponse,
            query={
                **validation.page(limit, offset),
            },
            about="listing checkpoints",
        )

    list_user_checkpoints_async = awaits(list_user_checkpoints)

    def all_user_checkpoints(self) -> Pages[Checkpoint]:
        """Every checkpoint, newest first: `for` or `async for`."""
        return by_offset(
            self.list_user_checkpoints,
            lambda found: found.checkpoints,
            lambda checkpoint: checkpoint.tinker_path,
            size=1000,
        )

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Promise[None]:
        """Delete a checkpoint permanently. `checkpoint_id` is like `weights/0001`."""
        return self._delete("delete_checkpoint", training_run_id, checkpoint_id)

    def _delete(self, name: str, training_run_id: str, checkpoint_id: str) -> Promise[None]:
        return self._ask(
            name,
            "DELETE",
            checkpoint_url(training_run_id, checkpoint_id),
            answer=type(None),
            about=f"deleting {checkpoint_id} of {training_run_id}",
        )

    delete_checkpoint_async = awaits(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Promise[None]:
        """Delete a checkpoint permanently."""
        return self._delete("delete_checkpoint_from_tinker_path", *checkpoint_at(tinker_path))

    delete_checkpoint_from_tinker_path_async = awaits(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> Promise[None]:
        """Let everybody who knows its path read a checkpoint."""
        return self._ask(
            "publish_checkpoint_from_tinker_path",
            "POST",
            f"{checkpoint_url(*checkpoint_at(tinker_path))}/publish",
            answer=type(None),
            about=f"publishing {tinker_path}",
        )

    publish_checkpoint_from_tinker_path_async = awaits(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> Promise[None]:
        """Make a published checkpoint private again."""
        return self._ask(
            "unpublish_checkpoint_from_tinker_path",
            "DELETE",
            f"{checkpoint_url(*checkpoint_at(tinker_path))}/publish",
            answer=type(None),
            about=f"unpublishing {tinker_path}",
        )

    unpublish_checkpoint_from_tinker_path_async = awaits(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> Promise[None]:
        """Set when a checkpoint expires, in seconds from now; None keeps it."""
        # A plain dict, so that null is sent.
        return self._ask(
            "set_checkpoint_ttl_from_tinker_path",
            "PUT",
            f"{checkpoint_url(*checkpoint_at(tinker_path))}/ttl",
            {"ttl_seconds": validation.ttl(ttl_seconds)},
            answer=type(None),
            about=f"setting the expiry of {tinker_path}",
        )

    set_checkpoint_ttl_from_tinker_path_async = awaits(set_checkpoint_ttl_from_tinker_path)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> Promise[str]:
        """
        Copy a checkpoint, your own or (with a key of its owner) another's; returns the new path.

        The copy goes into the given project, else into that of TINKER_PROJECT_ID.
        """
        checkpoint_at(path)
        project = destination_project_id or self.holder.settings.project_id
        if not project:
            raise ValueError(
                "A copy needs a project: pass destination_project_id=..., or set TINKER_PROJECT_ID."
            )
        body = CopyWeightsRequest(
            destination_project_id=project,
            source_path=path,
            ttl_seconds=validation.ttl(ttl_seconds),
        )
        # The same key for all attempts, so that a retry finds the copy of the first attempt.
        headers = {**sdk_headers("copy_weights"), "X-Idempotency-Key": str(uuid.uuid4())}
        if weights_access_token:
            headers["X-Tinker-Weights-Access-Token"] = weights_access_token

        async def work(connection: Connection) -> str:
            copied = await connection.calls.call(
                "POST",
                "copy_weights",
                body,
                answer=CopyWeightsResponse,
                kind=Kind.REST,
                headers=headers,
                about=f"copying {path}",
            )
            return copied.tinker_path

        return self._run(work, "POST", "copy_weights")

    copy_weights_async = awaits(copy_weights)

    # -- files -----------------------------------------------------------------------------------

    def get_external_weights_urls(self, tinker_path: str) -> Promise[ExternalWeightsUrlsResponse]:
        """A link for each file of a checkpoint from `save_weights_external`."""
        run, checkpoint = checkpoint_at(tinker_path)
        if not checkpoint.startswith("external_weights/"):
            raise ValueError(
                f"{tinker_path} is not an external checkpoint. Only "
                "tinker://RUN/external_weights/NAME, as returned by save_weights_external(), has "
                "a link for each file; tinkex.download_checkpoint() downloads every kind."
            )
        return self._ask(
            "get_external_weights_urls",
            "GET",
            f"{checkpoint_url(run, checkpoint)}/external_weights_urls",
            answer=ExternalWeightsUrlsResponse,
            about=f"fetching the files of {tinker_path}",
        )

    get_external_weights_urls_async = awaits(get_external_weights_urls)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> Promise[CheckpointArchiveUrlResponse]:
        """A link to a tar of the adapter's files. Not every service supports this."""
        path = f"{checkpoint_url(training_run_id, checkpoint_id)}/archive"

        async def work(connection: Connection) -> CheckpointArchiveUrlResponse:
            try:
                return await connection.calls.call(
                    "GET",
                    path,
                    answer=CheckpointArchiveUrlResponse,
                    kind=Kind.REST,
                    headers=sdk_headers("get_checkpoint_archive_url"),
                    follow_redirects=False,  # the redirect target is the result
                    about=f"requesting an archive of {checkpoint_id} of {training_run_id}",
                )
            except APIStatusError as error:
                url = redirected(error)
                if url is None:
                    raise
                expires = _expiry(error.response.headers.get("expires"))
                return CheckpointArchiveUrlResponse(url=url, expires=expires)

        return self._run(work, "GET", path)

    get_checkpoint_archive_url_async = awaits(get_checkpoint_archive_url)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> Promise[CheckpointArchiveUrlResponse]:
        """A link to a tar of the adapter's files, by path. Not every service supports this."""
        return self.get_checkpoint_archive_url(*checkpoint_at(tinker_path))

    get_checkpoint_archive_url_from_tinker_path_async = awaits(
        get_checkpoint_archive_url_from_tinker_path
    )

    # -- sessions and samplers -------------------------------------------------------------------

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> Promise[GetSessionResponse]:
        """The runs and samplers of a session."""
        return self._ask(
            "get_session",
            "GET",
            f"sessions/{segment('session_id', session_id)}",
            answer=GetSessionResponse,
            query={"access_scope": validation.scope(access_scope)},
            about=f"looking up session {session_id}",
        )

    get_session_async = awaits(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> Promise[ListSessionsResponse]:
        """A page of session ids, newest first."""
        return self._ask(
            "list_sessions",
            "GET",
            "sessions",
            answer=ListSessionsResponse,
            query={
                **validation.page(limit, offset),
                "access_scope": validation.scope(access_scope),
            },
            about="listing sessions",
        )

    list_sessions_async = awaits(list_sessions)

    def all_sessions(self, access_scope: AccessScope = "owned") -> Pages[str]:
        """The ids of all sessions, newest first: `for` or `async for`."""
        validation.scope(access_scope)
        return by_offset(
            lambda limit, offset: self.list_sessions(limit, offset, access_scope),
            lambda found: found.sessions,
            lambda session_id: session_id,
            size=100,
        )

    def search_sessions(self, request: SessionSearchRequest) -> Promise[SessionSearchResponse]:
        """Sessions by metadata, project, owner or state. Experimental."""
        user_warnings.warn(
            "search_sessions() is experimental: it may change or be removed.", ExperimentalWarning
        )
        return self._search(request)

    search_sessions_async = awaits(search_sessions)

    def all_found_sessions(self, request: SessionSearchRequest) -> Pages[SessionSummary]:
        """All results of a search: `for` or `async for`. Experimental."""
        user_warnings.warn(
            "all_found_sessions() is experimental: it may change or be removed.",
            ExperimentalWarning,
        )

        def fetch(cursor: SessionSearchCursor | None) -> Promise[SessionSearchResponse]:
            return self._search(
                request.model_copy(update={"cursor": cursor}) if cursor else request
            )

        return Pages(
            fetch,
            lambda _, found: Page(found.sessions, found.next_cursor),
            lambda found: found.session_id,
        )

    def _search(self, request: SessionSearchRequest) -> Promise[SessionSearchResponse]:
        if not isinstance(request, SessionSearchRequest):
            raise TypeError(
                f"search_sessions() takes a types.SessionSearchRequest, not a "
                f"{type(request).__name__}."
            )
        return self._ask(
            "search_sessions",
            "POST",
            "sessions/search",
            request,
            answer=SessionSearchResponse,
            about="searching sessions",
        )

    def assign_session_project(self, session_id: str, project_id: str) -> Promise[None]:
        """Move a session and its contents into a project."""
        segment("project_id", project_id)
        return self._ask(
            "assign_session_project",
            "PUT",
            f"sessions/{segment('session_id', session_id)}/project",
            {"project_id": project_id},
            answer=type(None),
            about=f"moving session {session_id}",
        )

    assign_session_project_async = awaits(assign_session_project)

    def export_session_trace(self, session_id: str) -> Promise[str]:
        """A link to a session's trace, once the service has created it."""
        path = f"sessions/{segment('session_id', session_id)}/trace_export"

        async def work(connection: Connection) -> str:
            pauses = itertools.chain([FIRST_TRACE_POLL_S], itertools.repeat(TRACE_POLL_S))

            async def poll() -> str:
                trace = await connection.calls.call(
                    "GET",
                    path,
                    answer=TraceExportResponse,
                    kind=Kind.REST,
                    headers=sdk_headers("export_session_trace"),
                    about=f"exporting the trace of session {session_id}",
                )
                if trace.status == "ready" and trace.url:
                    return trace.url
                if trace.status != "pending":
                    raise RuntimeError(
                        f"The service could not export the trace of session {session_id}: "
                        f"{trace.error or trace.status}."
                    )
                if (pause_s := next(pauses)) == FIRST_TRACE_POLL_S:
                    log.warning("the trace of session %s is being created; waiting", session_id)
                raise NotYet(pause_s)

            return await retrying(poll)

        return self._run(work, "GET", path)

    export_session_trace_async = awaits(export_session_trace)

    def get_sampler(self, sampler_id: str) -> Promise[GetSamplerResponse]:
        """The base model and the weights that a sampling session samples from."""
        return self._ask(
            "get_sampler",
            "GET",
            f"samplers/{segment('sampler_id', sampler_id)}",
            answer=GetSamplerResponse,
            about=f"looking up sampler {sampler_id}",
        )

    get_sampler_async = awaits(get_sampler)

    # -- the user --------------------------------------------------------------------------------

    def whoami(self) -> Promise[WhoamiResponse]:
        """The owner of the credential in use, according to its token."""

        async def work(connection: Connection) -> WhoamiResponse:
            return owner_of_token(await connection.credential.claims())

        return self._run(work, "GET", "auth/token")

    whoami_async = awaits(whoami)

    # -- moved to AdminClient --------------------------------------------------------------------

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> Promise[AuditLogResponse]:
        """Deprecated: use `AdminClient`."""
        _warn_moved("get_audit_log")
        return self._admin().get_audit_log(event_type, day)

    get_audit_log_async = awaits(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Promise[BillingUsageResponse]:
        """Deprecated: use `AdminClient`."""
        _warn_moved("get_billing_usage")
        return self._admin().get_billing_usage(starting_on, ending_before)

    get_billing_usage_async = awaits(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Promise[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient`."""
        _warn_moved("get_current_checkpoint_storage_usage")
        return self._admin().get_current_checkpoint_storage_usage(project_id)

    get_current_checkpoint_storage_usage_async = awaits(get_current_checkpoint_storage_usage)

    def _admin(self) -> AdminClient:
        admin = AdminClient(self._open_holder())
        admin._timeout_s = self._timeout_s
        return admin


def owner_of_token(claims: Mapping[str, Any]) -> WhoamiResponse:
    """The owner of a token. Tokens contain the organization's name; the result its URN."""
    user, organization, email = (claims.get(name) for name in ("sub", "org_id", "email"))
    if isinstance(user, str) and isinstance(organization, str):
        return WhoamiResponse(
            user_urn=user,
            org_urn=ORGANIZATION_PREFIX + organization.removeprefix(ORGANIZATION_PREFIX),
            email=email if isinstance(email, str) else None,
        )
    raise RuntimeError(
        "The token does not name its owner: it has no `sub` and `org_id`, unlike tokens of the "
        "service. Use a key, or a token from `POST /api/v1/auth/token`."
    )


def _expiry(text: str | None) -> datetime:
    """The expiry date in a header; a quarter of an hour from now if there is none."""
    from email.utils import parsedate_to_datetime

    try:
        expires = parsedate_to_datetime(text or "")
    except ValueError:
        return datetime.now(UTC) + ARCHIVE_LINK_TTL
    return expires.replace(tzinfo=UTC) if expires.tzinfo is None else expires


def _warn_moved(name: str) -> None:
    user_warnings.warn(
        f"RestClient.{name}() is deprecated: use AdminClient.{name}().", FutureWarning
    )

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
    TrainingRunMetricsResponse,
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
        """
        One run: its base model, its adapter, its last checkpoints.

        Args:
            training_run_id: The run, such as `TrainingClient.model_id`.
            access_scope: `"owned"`: yours; `"accessible"`: also what you may read of others.

        Returns:
            A future of the run.

        Raises:
            NotFoundError: No such run, or not yours.

        Example:
            print(rest.get_training_run(training.model_id).result().base_model)
        """
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
        """
        The run that a checkpoint was saved from.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.
            access_scope: `"owned"`: yours; `"accessible"`: also what you may read of others.

        Returns:
            A future of the run.

        Example:
            run = rest.get_training_run_by_tinker_path(path).result()
        """
        run, _ = checkpoint_at(tinker_path)
        return self._get_run("get_training_run_by_tinker_path", run, access_scope)

    get_training_run_by_tinker_path_async = awaits(get_training_run_by_tinker_path)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Promise[WeightsInfoResponse]:
        """
        What is needed to create a model that can load a checkpoint.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.

        Returns:
            A future of the base model, the rank and the layers that are trained.

        Example:
            print(rest.get_weights_info_by_tinker_path(path).result().lora_rank)
        """
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
        """
        A page of runs, newest first.

        Args:
            limit: Most runs of the page.
            offset: Runs to skip.
            access_scope: `"owned"`: yours; `"accessible"`: also what you may read of others.
            project_id: Runs of this project only.

        Returns:
            A future of the runs, and of how many there are in all.

        Example:
            for run in rest.list_training_runs(limit=5).result().training_runs:
                print(run.training_run_id)
        """
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
        """
        Every run, newest first. Pages are fetched as the loop reaches them.

        Args:
            access_scope: `"owned"`: yours; `"accessible"`: also what you may read of others.
            project_id: Runs of this project only.

        Returns:
            The runs, for `for` or `async for`.

        Example:
            ranks = [run.lora_rank for run in rest.all_training_runs()]
        """
        validation.scope(access_scope)
        return by_offset(
            lambda limit, offset: self.list_training_runs(limit, offset, access_scope, project_id),
            lambda found: found.training_runs,
            lambda run: run.training_run_id,
            size=100,
        )

    def get_training_run_metrics(
        self, training_run_id: str, points: int = 1000
    ) -> Promise[TrainingRunMetricsResponse]:
        """
        The metrics of each optimizer step of a run, in order. Only a tinkex server stores them.

        Args:
            training_run_id: The run, such as `TrainingClient.model_id`.
            points: The maximum number of points, 2 to 10,000. If the run has more steps, a point
                is the mean over several steps, except for the last one, which is exact.

        Returns:
            A future of the points.

        Example:
            for point in rest.get_training_run_metrics(training.model_id).result().points:
                print(point.step, point.metrics["loss"])
        """
        return self._ask(
            "get_training_run_metrics",
            "GET",
            f"training_runs/{segment('training_run_id', training_run_id)}/metrics",
            answer=TrainingRunMetricsResponse,
            query={"points": validation.points(points)},
            about=f"reading the metrics of run {training_run_id}",
        )

    get_training_run_metrics_async = awaits(get_training_run_metrics)

    # -- checkpoints -----------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: str) -> Promise[CheckpointsListResponse]:
        """
        All checkpoints of a run.

        Args:
            training_run_id: The run, such as `TrainingClient.model_id`.

        Returns:
            A future of the checkpoints.

        Example:
            for checkpoint in rest.list_checkpoints(training.model_id).result().checkpoints:
                print(checkpoint.tinker_path)
        """
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
        """
        A page of all checkpoints, newest first.

        Args:
            limit: Most checkpoints of the page.
            offset: Checkpoints to skip.

        Returns:
            A future of the checkpoints, and of how many there are in all.

        Example:
            newest = rest.list_user_checkpoints(limit=1).result().checkpoints
        """
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
        """
        Every checkpoint, newest first. Pages are fetched as the loop reaches them.

        Returns:
            The checkpoints, for `for` or `async for`.

        Example:
            paths = [checkpoint.tinker_path for checkpoint in rest.all_user_checkpoints()]
        """
        return by_offset(
            self.list_user_checkpoints,
            lambda found: found.checkpoints,
            lambda checkpoint: checkpoint.tinker_path,
            size=1000,
        )

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Promise[None]:
        """
        Delete a checkpoint permanently.

        Args:
            training_run_id: The run, such as `TrainingClient.model_id`.
            checkpoint_id: Kind and name, such as `weights/0001`.

        Returns:
            A future that is done when it is deleted.

        Example:
            rest.delete_checkpoint(training.model_id, "weights/0001").result()
        """
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
        """
        Delete a checkpoint permanently.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.

        Returns:
            A future that is done when it is deleted.

        Example:
            rest.delete_checkpoint_from_tinker_path(path).result()
        """
        return self._delete("delete_checkpoint_from_tinker_path", *checkpoint_at(tinker_path))

    delete_checkpoint_from_tinker_path_async = awaits(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> Promise[None]:
        """
        Let everybody who knows its path read a checkpoint.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.

        Returns:
            A future that is done when it is public.

        Example:
            rest.publish_checkpoint_from_tinker_path(path).result()
        """
        return self._ask(
            "publish_checkpoint_from_tinker_path",
            "POST",
            f"{checkpoint_url(*checkpoint_at(tinker_path))}/publish",
            answer=type(None),
            about=f"publishing {tinker_path}",
        )

    publish_checkpoint_from_tinker_path_async = awaits(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> Promise[None]:
        """
        Make a published checkpoint private again.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.

        Returns:
            A future that is done when it is private.

        Example:
            rest.unpublish_checkpoint_from_tinker_path(path).result()
        """
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
        """
        Set when a checkpoint expires.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.
            ttl_seconds: Seconds from now; None keeps it.

        Returns:
            A future that is done when it is set.

        Example:
            rest.set_checkpoint_ttl_from_tinker_path(path, 7 * 86400).result()
        """
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
        Copy a checkpoint, your own or (with a key of its owner) another's.

        Args:
            path: The checkpoint to copy.
            destination_project_id: Project of the copy; None: that of TINKER_PROJECT_ID.
            ttl_seconds: Seconds until the copy expires. None: never.
            weights_access_token: Key of the checkpoint's owner, if it is another account.

        Returns:
            A future of the path of the copy.

        Raises:
            ValueError: Not a path, or no project.

        Example:
            copy = rest.copy_weights(path, "project-1").result()
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
        """
        A link for each file of a checkpoint from `save_weights_external`.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.

        Returns:
            A future of the links by file name, and of when they expire.

        Raises:
            ValueError: A checkpoint of another kind.

        Example:
            path = training.save_weights_external("files").result().path
            links = rest.get_external_weights_urls(path).result().urls
        """
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
        """
        A link to a tar of the adapter's files. Not every service supports this.

        Args:
            training_run_id: The run, such as `TrainingClient.model_id`.
            checkpoint_id: Kind and name, such as `sampler_weights/0001`.

        Returns:
            A future of the link, and of when it expires.

        Example:
            link = rest.get_checkpoint_archive_url(training.model_id, "weights/0001").result().url
        """
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
        """
        A link to a tar of the adapter's files, by path. Not every service supports this.

        Args:
            tinker_path: The checkpoint, `tinker://RUN/KIND/NAME`.

        Returns:
            A future of the link, and of when it expires.

        Example:
            link = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
        """
        return self.get_checkpoint_archive_url(*checkpoint_at(tinker_path))

    get_checkpoint_archive_url_from_tinker_path_async = awaits(
        get_checkpoint_archive_url_from_tinker_path
    )

    # -- sessions and samplers -------------------------------------------------------------------

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> Promise[GetSessionResponse]:
        """
        The runs and samplers of a session.

        Args:
            session_id: The session, as in `list_sessions`.
            access_scope: `"owned"`: yours; `"accessible"`: also what you may read of others.

        Returns:
            A future of their ids.

        Example:
            print(rest.get_session("s-1").result().training_run_ids)
        """
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
        """
        A page of session ids, newest first.

        Args:
            limit: Most sessions of the page.
            offset: Sessions to skip.
            access_scope: `"owned"`: yours; `"accessible"`: also what you may read of others.

        Returns:
            A future of the ids.

        Example:
            print(rest.list_sessions(limit=5).result().sessions)
        """
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
        """
        The ids of all sessions, newest first. Pages are fetched as the loop reaches them.

        Args:
            access_scope: `"owned"`: yours; `"accessible"`: also what you may read of others.

        Returns:
            The ids, for `for` or `async for`.

        Example:
            count = len(list(rest.all_sessions()))
        """
        validation.scope(access_scope)
        return by_offset(
            lambda limit, offset: self.list_sessions(limit, offset, access_scope),
            lambda found: found.sessions,
            lambda session_id: session_id,
            size=100,
        )

    def search_sessions(self, request: SessionSearchRequest) -> Promise[SessionSearchResponse]:
        """
        Sessions by metadata, project, owner or state. Experimental.

        Args:
            request: What to search for.

        Returns:
            A future of the sessions of one page, and of where the next one starts.

        Example:
            wanted = tinkex.types.SessionSearchRequest(user_metadata={"team": "speech"})
            print(rest.search_sessions(wanted).result().sessions)
        """
        user_warnings.warn(
            "search_sessions() is experimental: it may change or be removed.", ExperimentalWarning
        )
        return self._search(request)

    search_sessions_async = awaits(search_sessions)

    def all_found_sessions(self, request: SessionSearchRequest) -> Pages[SessionSummary]:
        """
        All results of a search. Experimental.

        Args:
            request: What to search for.

        Returns:
            The sessions, for `for` or `async for`.

        Example:
            wanted = tinkex.types.SessionSearchRequest(display_name="nightly")
            found = list(rest.all_found_sessions(wanted))
        """
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
        """
        Move a session and its contents into a project.

        Args:
            session_id: The session.
            project_id: The project.

        Returns:
            A future that is done when it is moved.

        Example:
            rest.assign_session_project("s-1", "project-1").result()
        """
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
        """
        A link to a session's trace, once the service has created it.

        Args:
            session_id: The session.

        Returns:
            A future of the link.

        Example:
            link = rest.export_session_trace("s-1").result()
        """
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
        """
        The base model and the weights that a sampling session samples from.

        Args:
            sampler_id: Id of the sampling session, as in `get_session`.

        Returns:
            A future of both.

        Example:
            print(rest.get_sampler("s-1:sample:0").result().base_model)
        """
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
        """
        The owner of the credential in use, according to its token.

        Returns:
            A future of the user and the organization.

        Example:
            print(rest.whoami().result().user_urn)
        """

        async def work(connection: Connection) -> WhoamiResponse:
            return owner_of_token(await connection.credential.claims())

        return self._run(work, "GET", "auth/token")

    whoami_async = awaits(whoami)

    # -- moved to AdminClient --------------------------------------------------------------------

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> Promise[AuditLogResponse]:
        """
        Deprecated: use `AdminClient.get_audit_log`.

        Args:
            event_type: Kind of events, such as `"checkpoints"`.
            day: The day (UTC). None: the latest events.

        Returns:
            A future of the events.

        Example:
            print(admin.get_audit_log("checkpoints").result().entries)
        """
        _warn_moved("get_audit_log")
        return self._admin().get_audit_log(event_type, day)

    get_audit_log_async = awaits(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Promise[BillingUsageResponse]:
        """
        Deprecated: use `AdminClient.get_billing_usage`.

        Args:
            starting_on: First hour.
            ending_before: The hour after the last one.

        Returns:
            A future of the usage of each hour.

        Example:
            usage = admin.get_billing_usage("2026-11-01", "2026-11-08").result()
        """
        _warn_moved("get_billing_usage")
        return self._admin().get_billing_usage(starting_on, ending_before)

    get_billing_usage_async = awaits(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Promise[CurrentCheckpointStorageUsageResponse]:
        """
        Deprecated: use `AdminClient.get_current_checkpoint_storage_usage`.

        Args:
            project_id: Of this project only.

        Returns:
            A future of the storage, by project and owner.

        Example:
            usage = admin.get_current_checkpoint_storage_usage().result()
        """
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

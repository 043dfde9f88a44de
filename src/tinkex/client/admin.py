"""AdminClient: the audit log and billing of an organization."""

from __future__ import annotations

from datetime import date, datetime
from typing import get_args

from tinkex.client import validation
from tinkex.client.auth.credentials import StaticCredential
from tinkex.client.connection import Connection
from tinkex.client.errors import APIStatusError
from tinkex.client.futures import Promise, awaits
from tinkex.client.http.transport import Kind, Request, origin, redirect_url
from tinkex.client.http.typed_requests import decode
from tinkex.client.rest_base import Sessionless, sdk_headers, with_query
from tinkex.tracebacks import public_edge
from tinkex.wire.billing import (
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    UsageByKeyResponse,
)
from tinkex.wire.codec import JSON_TYPE


@public_edge
class AdminClient(Sessionless):
    """
    Audit log, usage and storage of an organization.

        admin = tinkex.AdminClient()
        print(admin.get_audit_log("checkpoints").result().entries)

    Every method returns a future immediately; its `_async` variant returns the value.
    """

    def get_audit_log(
        self, event_type: validation.AuditEvents = "all", day: date | None = None
    ) -> Promise[AuditLogResponse]:
        """
        Audit events of one kind.

        Args:
            event_type: `"all"`, `"checkpoints"`, `"projects"`, `"teams"` or `"organizations"`.
            day: The day (UTC). None: the latest events.

        Returns:
            A future of the events.

        Example:
            print(admin.get_audit_log("checkpoints").result().entries)
        """
        validation.one_of("event_type", event_type, get_args(validation.AuditEvents))
        path = with_query("audit", {"event_type": event_type, "day": validation.day(day)})

        async def work(connection: Connection) -> AuditLogResponse:
            calls, about = connection.calls, "fetching the audit log"
            try:
                return await calls.call(
                    "GET",
                    path,
                    answer=AuditLogResponse,
                    kind=Kind.REST,
                    headers=sdk_headers("get_audit_log"),
                    about=about,
                )
            except APIStatusError as error:
                url = redirected(error)
                if url is None:
                    raise
            # For a large log the service redirects to its storage, which may be another host. The
            # key must not be sent there.
            if origin(url) != origin(self.holder.settings.base_url):
                calls = calls.with_credential(StaticCredential(None))
            request = Request(method="GET", url=url, headers={"Accept": JSON_TYPE}, kind=Kind.REST)
            response = await calls.once(request, about=about)
            return decode(AuditLogResponse, response, about=about)

        return self._run(work, "GET", path)

    get_audit_log_async = awaits(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Promise[BillingUsageResponse]:
        """
        Usage per hour.

        Args:
            starting_on: First hour. Times without a zone are UTC.
            ending_before: The hour after the last one, at most 14 days later.

        Returns:
            A future of the usage of each hour.

        Raises:
            ValueError: Not whole hours, or not in this order.

        Example:
            usage = admin.get_billing_usage("2026-11-01", "2026-11-08").result()
        """
        start = validation.moment("starting_on", starting_on)
        end = validation.moment("ending_before", ending_before)
        if end <= start:
            raise ValueError(
                f"ending_before ({end.isoformat()}) must be after starting_on ({start.isoformat()})."
            )
        return self._ask(
            "get_billing_usage",
            "GET",
            "billing/usage/events",
            answer=BillingUsageResponse,
            query={"starting_on": _utc(start), "ending_before": _utc(end)},
            about="fetching the usage",
        )

    get_billing_usage_async = awaits(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Promise[CurrentCheckpointStorageUsageResponse]:
        """
        Current storage of checkpoints, by project and owner.

        Args:
            project_id: Of this project only.

        Returns:
            A future of the storage in use.

        Example:
            usage = admin.get_current_checkpoint_storage_usage().result()
        """
        return self._ask(
            "get_current_checkpoint_storage_usage",
            "GET",
            "billing/usage/checkpoints/current",
            answer=CurrentCheckpointStorageUsageResponse,
            query={"project_id": project_id},
            about="fetching the storage in use",
        )

    get_current_checkpoint_storage_usage_async = awaits(get_current_checkpoint_storage_usage)

    def get_usage_by_key(self, days: int = 30) -> Promise[UsageByKeyResponse]:
        """
        Tokens by API key and base model. Only a tinkex server stores them.

        Args:
            days: Of these last days (UTC), with today: 1 to 90.

        Returns:
            A future of the usage: of your keys, and with an administrator's key of all keys.

        Example:
            for used in admin.get_usage_by_key(days=7).result().data:
                print(used.name, used.base_model, used.training + used.sampled)
        """
        return self._ask(
            "get_usage_by_key",
            "GET",
            "billing/usage/keys",
            answer=UsageByKeyResponse,
            query={"days": days},
            about="fetching the usage by key",
        )

    get_usage_by_key_async = awaits(get_usage_by_key)


def redirected(error: APIStatusError) -> str | None:
    """The redirect target of an error response, if it is a redirect."""
    location = error.response.headers.get("location")
    if error.status_code not in (301, 302, 303, 307, 308) or not location:
        return None
    return redirect_url(error.response.request.url, location)


def _utc(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")

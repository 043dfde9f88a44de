"""REST calls with either client: `python rest_calls_program.py tinker|tinkex URL`."""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from typing import Any

STATE = "tinker://s:train:0/weights/a"
EXPORT = "tinker://s:train:0/external_weights/a"
DAY, NEXT = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


def calls(package: Any, types: Any, url: str) -> Iterator[Callable[[], Any]]:
    rest = package.RestClient(base_url=url, api_key="tml-x")
    admin = package.AdminClient(base_url=url, api_key="tml-x")
    search = types.SessionSearchRequest(
        display_name="d",
        user_metadata={"a": "b"},
        statuses=[types.ActiveSessionStatusQuery()],
        limit=3,
        cursor=types.SessionSearchCursor(last_created_at=DAY, last_session_id="x"),
    )
    yield lambda: rest.get_training_run("s:train:0")
    yield lambda: rest.get_training_run_by_tinker_path(STATE, "accessible")
    yield lambda: rest.get_weights_info_by_tinker_path(STATE)
    yield lambda: rest.list_training_runs()
    yield lambda: rest.list_training_runs(5, 7, "accessible", "p q")
    yield lambda: rest.list_checkpoints("s:train:0")
    yield lambda: rest.get_external_weights_urls(EXPORT)
    yield lambda: rest.delete_checkpoint("s:train:0", "weights/a")
    yield lambda: rest.delete_checkpoint_from_tinker_path(STATE)
    yield lambda: rest.publish_checkpoint_from_tinker_path(STATE)
    yield lambda: rest.unpublish_checkpoint_from_tinker_path(STATE)
    yield lambda: rest.set_checkpoint_ttl_from_tinker_path(STATE, 7200)
    yield lambda: rest.set_checkpoint_ttl_from_tinker_path(STATE, None)
    yield lambda: rest.list_user_checkpoints()
    yield lambda: rest.copy_weights(STATE, "p", ttl_seconds=7200, weights_access_token="tml-y")
    yield lambda: rest.get_session("s")
    yield lambda: rest.list_sessions()
    yield lambda: rest.assign_session_project("s", "p")
    yield lambda: rest.export_session_trace("s")
    yield lambda: rest.get_sampler("s:sample:0")
    yield lambda: rest.search_sessions(search)
    yield lambda: admin.get_audit_log()
    yield lambda: admin.get_audit_log("projects", date(2026, 1, 31))
    yield lambda: admin.get_billing_usage(DAY, NEXT)
    yield lambda: admin.get_billing_usage("2026-01-01T00:00:00Z", "2026-01-02T00:00:00+00:00")
    yield lambda: admin.get_current_checkpoint_storage_usage()
    yield lambda: admin.get_current_checkpoint_storage_usage("p")


def main() -> None:
    name, url = sys.argv[1:]
    warnings.simplefilter("ignore")
    package, types = importlib.import_module(name), importlib.import_module(f"{name}.types")
    for call in calls(package, types, url):
        try:
            call().result(20)
        except package.UnprocessableEntityError:  # the stub server always returns 422
            continue
        raise AssertionError("a 422 was expected")


if __name__ == "__main__":
    main()

"""What RestClient and AdminClient send, refuse and share, against a stand-in service."""

import asyncio
import base64
import gc
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

import tinkex
from http_stub import Received, Reply, StubServer, reply_json, stub_server
from tinkex import AdminClient, RestClient, types
from tinkex.client import rest as rest_module
from tinkex.client import rest_base
from tinkex.client.rest import owner_of_token
from tinkex.testing import Answer, FakeService

RUN = "s:train:0"
PATH = f"tinker://{RUN}/weights/a"

Script = dict[str, Reply | Callable[[Received], Reply]]


class Service:
    """Responses by "METHOD path"; a request that is not in the script is a 404."""

    def __init__(self) -> None:
        self.script: Script = {
            "POST /api/v1/client/config": reply_json({}),
            "POST /api/v1/client/dynamic_config": reply_json({}),
        }
        self.standin: StubServer = StubServer()

    def __call__(self, request: Received) -> Reply:
        found = self.script.get(f"{request.method} {request.path}")
        if found is None:
            return reply_json({"detail": f"nothing at {request.path}"}, 404)
        return found(request) if callable(found) else found

    @property
    def url(self) -> str:
        return self.standin.url

    @property
    def requests(self) -> list[Received]:
        """Without the requests that every client sends first."""
        return [each for each in self.standin.requests if "/client/" not in each.path]


@pytest.fixture
def here() -> Iterator[Service]:
    service = Service()
    with stub_server(service) as service.standin:
        yield service


@pytest.fixture
def rest(here: Service) -> Iterator[RestClient]:
    with RestClient(base_url=here.url, api_key="tml-one") as client:
        yield client


# -- arguments ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("get_training_run", ("",), "training_run_id"),
    ("get_training_run", ("..",), "training_run_id"),
    ("get_training_run", (None,), "training_run_id"),
    ("get_training_run", (RUN, "everyone's"), "owned, accessible"),
    ("get_training_run_by_tinker_path", ("tinker://a/b",), "Invalid tinker path"),
    ("get_weights_info_by_tinker_path", (None,), "Invalid tinker path"),
    ("list_training_runs", (-1,), "limit"),
    ("list_training_runs", (1, 1.5), "offset"),
    ("list_training_runs", (1, 0, "all"), "access_scope"),
    ("list_checkpoints", ("",), "training_run_id"),
    ("list_user_checkpoints", (True,), "limit"),
    ("delete_checkpoint", (RUN, "weights/../a"), "checkpoint_id"),
    ("delete_checkpoint", (RUN, "weights/"), "checkpoint_id"),
    ("delete_checkpoint_from_tinker_path", ("weights/a",), "Invalid tinker path"),
    ("publish_checkpoint_from_tinker_path", ("tinker://a/b/c",), "external_weights"),
    ("unpublish_checkpoint_from_tinker_path", ("",), "Invalid tinker path"),
    ("set_checkpoint_ttl_from_tinker_path", (PATH, 0), "ttl_seconds"),
    ("set_checkpoint_ttl_from_tinker_path", (PATH, "1h"), "ttl_seconds"),
    ("copy_weights", ("x", "p"), "Invalid tinker path"),
    ("copy_weights", (PATH,), "TINKER_PROJECT_ID"),
    ("get_external_weights_urls", (PATH,), "save_weights_external"),
    ("get_checkpoint_archive_url", (RUN, ""), "checkpoint_id"),
    ("get_session", ("s", "mine"), "access_scope"),
    ("list_sessions", (1, -1), "offset"),
    ("assign_session_project", ("s", ""), "project_id"),
    ("export_session_trace", ("",), "session_id"),
    ("get_sampler", ("",), "sampler_id"),
]


@pytest.mark.parametrize(("method", "args", "says"), WRONG)
def test_defect_6_wrong_arguments_are_refused_at_once_and_nothing_is_sent(
    here: Service, method: str, args: tuple[Any, ...], says: str
) -> None:
    client = RestClient(base_url=here.url)
    began = time.monotonic()
    with pytest.raises(ValueError, match=says):
        getattr(client, method)(*args)
    with pytest.raises(ValueError, match=says):
        asyncio.run(getattr(client, f"{method}_async")(*args))
    assert time.monotonic() - began < 10
    assert here.standin.requests == []


def test_defect_6_errors_are_not_delayed_by_telemetry_that_cannot_be_sent(here: Service) -> None:
    here.script["POST /api/v1/create_session"] = reply_json({"session_id": "s"})
    here.script["POST /api/v1/telemetry"] = reply_json({"detail": "down"}, 500)
    here.script["GET /api/v1/samplers/x"] = reply_json({"detail": "malformed"}, 422)
    service = tinkex.ServiceClient(base_url=here.url)
    rest = RestClient(service.holder)
    began = time.monotonic()
    with pytest.raises(tinkex.NotFoundError):
        service.create_sampling_client(base_model="m")
    assert service.get_telemetry() is not None
    with pytest.raises(tinkex.UnprocessableEntityError, match="malformed"):
        rest.get_sampler("x").result(10)
    with pytest.raises(ValueError, match="Invalid tinker path"):
        rest.get_training_run_by_tinker_path("nonsense")
    assert time.monotonic() - began < 5
    service.close("success").result(10)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="closed"):
        rest.get_sampler("x")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("method", "args", "says"),
    [
        ("get_audit_log", ("everything",), "organizations"),
        ("get_audit_log", ("all", datetime(2026, 1, 1)), "datetime.date"),
        ("get_audit_log", ("all", "January"), "datetime.date"),
        ("get_billing_usage", ("yesterday", "2026-01-02"), "starting_on"),
        ("get_billing_usage", ("2026-01-01", None), "ending_before"),
        ("get_billing_usage", ("2026-01-02", "2026-01-01"), "after starting_on"),
    ],
)
def test_wrong_arguments_of_the_admin_client_are_refused_at_once(
    here: Service, method: str, args: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        getattr(AdminClient(base_url=here.url), method)(*args)
    assert here.standin.requests == []


def test_a_holder_and_credentials_together_are_refused(rest: RestClient) -> None:
    with pytest.raises(ValueError, match="leave out"):
        RestClient(rest.holder, api_key="tml-two")


# -- what is sent ------------------------------------------------------------------------------------


def test_defect_22_ids_are_quoted(here: Service, rest: RestClient) -> None:
    run = "a/b?limit=1#c d%2e:ü"
    with pytest.raises(tinkex.NotFoundError):
        rest.list_checkpoints(run).result(10)
    with pytest.raises(tinkex.NotFoundError):
        rest.delete_checkpoint("r", "weights/x?y").result(10)
    quoted = "a%2Fb%3Flimit=1%23c%20d%252e:%C3%BC".replace("=", "%3D")
    paths = [each.path.replace("=", "%3D") for each in here.requests]
    assert paths == [
        f"/api/v1/training_runs/{quoted}/checkpoints",
        "/api/v1/training_runs/r/checkpoints/weights/x%3Fy",
    ]


def test_lists_send_what_the_official_client_sends(here: Service, rest: RestClient) -> None:
    for call in (
        rest.list_training_runs(5, 10, "accessible", "p q"),
        rest.list_user_checkpoints(),
        rest.list_sessions(),
    ):
        with pytest.raises(tinkex.NotFoundError):
            call.result(10)
    assert {each.path for each in here.requests} == {
        "/api/v1/training_runs?limit=5&offset=10&access_scope=accessible&project_id=p+q",
        "/api/v1/checkpoints?limit=100&offset=0",
        "/api/v1/sessions?limit=20&offset=0&access_scope=owned",
    }
    assert {each.headers["x-api-key"] for each in here.requests} == {"tml-one"}


def test_the_absence_of_an_expiry_is_sent_as_null(here: Service, rest: RestClient) -> None:
    place = f"PUT /api/v1/training_runs/{RUN}/checkpoints/weights/a/ttl"
    here.script[place] = Reply(status=204)
    assert rest.set_checkpoint_ttl_from_tinker_path(PATH, None).result(10) is None
    rest.set_checkpoint_ttl_from_tinker_path(PATH, 7200).result(10)
    assert [each.json() for each in here.requests] == [{"ttl_seconds": None}, {"ttl_seconds": 7200}]


def test_a_copy_is_retried_under_one_key_and_sends_the_token_in_a_header(
    here: Service, rest: RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([reply_json({"detail": "busy"}, 503), reply_json({"tinker_path": PATH})])
    here.script["POST /api/v1/copy_weights"] = lambda _: next(answers)
    with_other_key = rest.copy_weights(
        PATH, "p", ttl_seconds=7200, weights_access_token="tml-theirs"
    )
    assert with_other_key.result(10) == PATH
    first, second = here.requests
    assert first.headers["x-idempotency-key"] == second.headers["x-idempotency-key"]
    assert first.headers["x-tinker-weights-access-token"] == "tml-theirs"
    assert first.headers["x-api-key"] == "tml-one"
    assert first.json() == {
        "destination_project_id": "p",
        "source_path": PATH,
        "ttl_seconds": 7200,
    }


def test_the_project_of_a_copy_may_come_from_the_environment(
    here: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_PROJECT_ID", "ours")
    here.script["POST /api/v1/copy_weights"] = reply_json({"tinker_path": PATH})
    with RestClient(base_url=here.url) as rest:
        assert asyncio.run(rest.copy_weights_async(PATH)) == PATH
    with tinkex.ServiceClient(base_url=here.url, project_id="mine") as service:
        assert service.copy_weights(PATH).result(10) == PATH
    sent = [each.json() for each in here.requests if each.path.endswith("copy_weights")]
    assert [each["destination_project_id"] for each in sent] == ["ours", "mine"]


def test_an_archive_link_is_read_from_a_redirect_and_from_json(
    here: Service, rest: RestClient
) -> None:
    place = f"GET /api/v1/training_runs/{RUN}/checkpoints/weights/a/archive"
    link = "https://files.invalid/a?signature=x"
    when = "Wed, 21 Oct 2037 07:28:00 GMT"
    here.script[place] = Reply(status=302, headers={"Location": link, "Expires": when})
    found = rest.get_checkpoint_archive_url(RUN, "weights/a").result(10)
    assert found.url == link
    assert found.expires == datetime(2037, 10, 21, 7, 28, tzinfo=UTC)
    here.script[place] = Reply(status=302, headers={"Location": link})
    left = rest.get_checkpoint_archive_url_from_tinker_path(PATH).result(10).expires
    assert 800 < (left - datetime.now(UTC)).total_seconds() <= 900
    here.script[place] = reply_json({"url": link, "expires": "2037-10-21T07:28:00Z"})
    twin = asyncio.run(rest.get_checkpoint_archive_url_from_tinker_path_async(PATH))
    assert twin == found


def test_an_audit_log_on_another_host_is_fetched_without_the_key(
    here: Service, rest: RestClient
) -> None:
    admin = AdminClient(base_url=here.url, api_key="tml-one")
    entry = {"timestamp": "2026-01-01T00:00:00Z", "event": "made"}
    with stub_server(lambda _: reply_json({"entries": [entry]})) as elsewhere:
        here.script["GET /api/v1/audit?event_type=all&day=2026-01-31"] = Reply(
            status=302, headers={"Location": f"{elsewhere.url}/log?signature=x"}
        )
        log = admin.get_audit_log(day=date(2026, 1, 31)).result(10)
        assert [each.event for each in log.entries] == ["made"]
        assert [each.path for each in elsewhere.requests] == ["/log?signature=x"]
        assert "tml-one" not in str(elsewhere.requests[0].headers)
    admin.close().result(5)


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://h.invalid:443/api/v1/log", True),
        ("https://H.invalid/api/v1/log", True),
        ("http://h.invalid:443/api/v1/log", False),
        ("https://h.invalid:444/api/v1/log", False),
    ],
)
def test_an_audit_log_of_the_same_origin_is_fetched_with_the_key(
    location: str, shown: bool
) -> None:
    """Whether or not the default port is written."""
    fake = FakeService()
    fake.script("audit", Answer(status=302, headers={"location": location}))
    with fake.client(base_url="https://h.invalid", api_key="tml-one") as service:
        with pytest.raises(tinkex.TinkerError):
            AdminClient(service.holder).get_audit_log().result(10)
        last = [each for each in fake.requests if each.endpoint.endswith("log")][-1]
        assert ("x-api-key" in last.headers) is shown


def test_usage_is_requested_in_utc(here: Service, rest: RestClient) -> None:
    with AdminClient(base_url=here.url) as admin:
        for start, end in (
            ("2026-01-01T02:00:00+02:00", datetime(2026, 1, 1, 5)),
            (datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T05:00"),
        ):
            with pytest.raises(tinkex.NotFoundError):
                admin.get_billing_usage(start, end).result(10)
    wanted = "starting_on=2026-01-01T00%3A00%3A00Z&ending_before=2026-01-01T05%3A00%3A00Z"
    paths = {each.path.replace(":", "%3A") for each in here.requests}
    assert paths == {f"/api/v1/billing/usage/events?{wanted}"}


# -- traces ------------------------------------------------------------------------------------------


def test_a_trace_is_polled_early_and_then_at_a_fixed_interval(
    here: Service,
    rest: RestClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert rest_module.TRACE_POLL_S == 5
    assert rest_module.FIRST_TRACE_POLL_S < 1
    monkeypatch.setattr(rest_module, "FIRST_TRACE_POLL_S", 0.001)
    monkeypatch.setattr(rest_module, "TRACE_POLL_S", 0.002)
    answers = iter(
        [reply_json({"status": "pending"})] * 3
        + [reply_json({"status": "ready", "url": "http://x/y"})]
        + [reply_json({"status": "failed", "error": "too old"})]
    )
    here.script["GET /api/v1/sessions/s/trace_export"] = lambda _: next(answers)
    assert rest.export_session_trace("s").result(10) == "http://x/y"
    assert len([r for r in caplog.records if "being created" in r.message]) == 1
    with pytest.raises(RuntimeError, match="too old"):
        asyncio.run(rest.export_session_trace_async("s"))


# -- warnings and kinds ------------------------------------------------------------------------------


def test_o7_every_call_returns_one_kind_of_future_and_every_async_variant_the_value(
    here: Service, rest: RestClient
) -> None:
    here.script["GET /api/v1/sessions/s?access_scope=owned"] = reply_json(
        {"training_run_ids": [RUN], "sampler_ids": []}
    )
    future = rest.get_session("s")
    assert isinstance(future, Future)
    assert isinstance(future, tinkex.APIFuture)

    async def both() -> None:
        assert await future == await future == await rest.get_session_async("s")

    asyncio.run(both())
    assert future.result(5).training_run_ids == [RUN]
    public = {name for name in dir(RestClient) if not name.startswith("_")}
    for name in public - {"holder", "close", "get_telemetry", "with_timeout"}:
        if name.startswith("all_"):
            continue
        assert inspect.iscoroutinefunction(getattr(RestClient, name)) == name.endswith("_async")
        assert name.endswith("_async") or f"{name}_async" in public


def test_the_reference_has_every_method() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "rest.md"
    text = page.read_text()
    for client in (RestClient, AdminClient):
        names = {name for name in dir(client) if not name.startswith("_")} - {"holder"}
        assert [name for name in names if f"`{name.removesuffix('_async')}" not in text] == []


def test_o7_blocking_on_an_event_loop_warns_with_the_name_of_the_method(
    here: Service, rest: RestClient
) -> None:
    async def wrong() -> None:
        rest.get_sampler("x").result(10)

    with pytest.warns(RuntimeWarning, match="result_async"), pytest.raises(tinkex.NotFoundError):
        asyncio.run(wrong())


def test_experimental_and_moved_methods_warn_at_the_callers_line(
    here: Service, rest: RestClient
) -> None:
    here.script["POST /api/v1/sessions/search"] = reply_json({"sessions": []})
    here.script["GET /api/v1/audit?event_type=all"] = reply_json({"entries": []})
    request = types.SessionSearchRequest(limit=3)
    with pytest.warns(tinkex.ExperimentalWarning, match="search_sessions") as seen:
        assert rest.search_sessions(request).result(10).sessions == []
    assert seen[0].filename == __file__
    with pytest.warns(tinkex.ExperimentalWarning) as seen:
        asyncio.run(rest.search_sessions_async(request))
    with pytest.warns(FutureWarning, match=r"AdminClient.get_audit_log") as seen:
        assert rest.get_audit_log().result(10).entries == []
    assert seen[0].filename == __file__
    with (
        pytest.warns(FutureWarning, match="get_billing_usage"),
        pytest.raises(ValueError, match="starting_on"),
    ):
        rest.get_billing_usage("x", "y")
    with pytest.warns(FutureWarning), pytest.raises(tinkex.NotFoundError):
        rest.get_current_checkpoint_storage_usage("p").result(10)
    with (
        pytest.warns(tinkex.ExperimentalWarning),
        pytest.raises(TypeError, match="SessionSearchRequest"),
    ):
        rest.search_sessions({})  # type: ignore[arg-type]
    service = tinkex.ServiceClient(base_url=here.url)
    with pytest.warns(FutureWarning, match="RestClient") as seen:
        assert service.create_rest_client().holder is service.holder
    assert seen[0].filename == __file__
    assert service.get_telemetry() is None
    service.close("success").result(5)


def test_a_call_can_have_its_own_timeout(here: Service, rest: RestClient) -> None:
    def slow(_: Received) -> Reply:
        time.sleep(0.5)
        return reply_json({"sessions": []})

    here.script["GET /api/v1/sessions?limit=20&offset=0&access_scope=owned"] = slow
    impatient = rest.with_timeout(0.1)
    with pytest.raises(tinkex.APITimeoutError):
        impatient.list_sessions().result(5)
    assert rest.list_sessions().result(5).sessions == []
    with pytest.raises(ValueError, match="above zero"):
        rest.with_timeout(0)


# -- who is asking -----------------------------------------------------------------------------------


def test_whoami_reads_the_token_and_sends_nothing(here: Service) -> None:
    claims = {"iss": "passport-x", "sub": "tml:user:me", "org_id": "us", "email": "me@us.invalid"}
    middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    with RestClient(base_url=here.url, api_key=f"eyJhbGciOiJub25lIn0.{middle}.x") as rest:
        me = rest.whoami().result(10)
        assert me == types.WhoamiResponse(
            user_urn="tml:user:me", org_urn="tml:organization:us", email="me@us.invalid"
        )
        assert asyncio.run(rest.whoami_async()) == me
    with (
        RestClient(base_url=here.url, api_key="tml-plain") as rest,
        pytest.raises(RuntimeError, match="token"),
    ):
        rest.whoami().result(10)
    assert here.requests == []


def test_a_token_without_an_owner_is_an_error() -> None:
    urn = "tml:organization:us"
    assert owner_of_token({"sub": "a", "org_id": urn, "email": 3}) == types.WhoamiResponse(
        user_urn="a", org_urn=urn
    )
    for claims in ({"sub": "a"}, {"org_id": "b"}, {"sub": 1, "org_id": 2}):
        with pytest.raises(RuntimeError, match="does not name its owner"):
            owner_of_token(claims)


# -- pages -------------------------------------------------------------------------------------------


def test_a_list_is_fetched_page_by_page_without_duplicates(here: Service, rest: RestClient) -> None:
    ids = [f"s-{number}" for number in range(205)]

    def page(request: Received) -> Reply:
        query = dict(pair.split("=") for pair in request.path.partition("?")[2].split("&"))
        start = int(query["offset"])
        found = ids[start : start + int(query["limit"])]
        if start == 0:
            ids.insert(0, "s-new")  # created during the loop: the rest shifts down
        return reply_json({"sessions": found})

    def answer(request: Received) -> Reply:
        return page(request) if "/sessions?" in request.path else Service.__call__(here, request)

    with stub_server(answer) as paged, RestClient(base_url=paged.url) as client:
        everything = client.all_sessions()
        assert list(everything) == [f"s-{number}" for number in range(205)]

        async def gathered() -> list[str]:
            return [each async for each in everything]

        assert len(asyncio.run(gathered())) == 206
        with pytest.raises(ValueError, match="access_scope"):
            client.all_sessions("nobody's")  # type: ignore[arg-type]


def test_a_search_continues_from_its_cursor(here: Service, rest: RestClient) -> None:
    def found(name: str) -> dict[str, Any]:
        return {
            "session_id": name,
            "created_at": "2026-01-01T00:00:00Z",
            "owner": "me",
            "project_id": "p",
            "checkpoints_count": 0,
        }

    cursor = {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "a"}

    def answer(request: Received) -> Reply:
        if "cursor" in request.json():
            return reply_json({"sessions": [found("b")]})
        return reply_json({"sessions": [found("a")], "next_cursor": cursor})

    here.script["POST /api/v1/sessions/search"] = answer
    with pytest.warns(tinkex.ExperimentalWarning):
        pages = rest.all_found_sessions(types.SessionSearchRequest(limit=1))
    assert [each.session_id for each in pages] == ["a", "b"]


# -- sharing a connection ----------------------------------------------------------------------------


def test_o9_clients_of_one_service_and_key_share_a_connection_and_close_independently(
    here: Service,
) -> None:
    here.script["GET /api/v1/sessions?limit=20&offset=0&access_scope=owned"] = reply_json(
        {"sessions": []}
    )
    first = RestClient(base_url=here.url, api_key="tml-a")
    second = RestClient(base_url=f"{here.url}/", api_key="tml-a")
    other = RestClient(base_url=here.url, api_key="tml-b")
    admin = AdminClient(base_url=here.url, api_key="tml-a")
    impatient = first.with_timeout(5)
    assert first.holder is second.holder is admin.holder is impatient.holder
    assert other.holder is not first.holder
    first.list_sessions().result(5)
    first.close().result(5)
    with pytest.raises(RuntimeError, match="This RestClient is closed"):
        first.list_sessions()
    first.close().result(5)
    assert second.list_sessions().result(5).sessions == []
    for client in (second, admin):
        client.close().result(5)
    assert impatient.list_sessions().result(5).sessions == []
    impatient.close().result(5)
    assert impatient.holder.closed
    assert not other.holder.closed
    # After the last was closed, the next one opens a new connection.
    with RestClient(base_url=here.url, api_key="tml-a") as again:
        assert again.list_sessions().result(5).sessions == []
    other.close().result(5)


def test_o9_closing_a_client_of_a_service_client_leaves_the_session_open(
    fake: FakeService,
) -> None:
    with fake.client() as service:
        rest = RestClient(service.holder)
        rest.close().result(5)
        with pytest.raises(RuntimeError, match="closed"):
            rest.list_sessions()
        assert service.get_server_capabilities().supported_models
        alive = RestClient(service.holder)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="closed"):
        alive.list_sessions()
    assert time.monotonic() - began < 10


def test_o9_an_unused_connection_is_closed(here: Service) -> None:
    here.script["GET /api/v1/sessions?limit=20&offset=0&access_scope=owned"] = reply_json(
        {"sessions": []}
    )
    rest = RestClient(base_url=here.url, api_key="tml-gone")
    rest.list_sessions().result(5)
    key = rest.holder.settings.limits_key
    assert key in rest_base._holders
    del rest
    deadline = time.monotonic() + 5
    while key in rest_base._holders and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert key not in rest_base._holders


def test_a_forked_child_uses_its_own_connection(here: Service) -> None:
    here.script["GET /api/v1/sessions?limit=20&offset=0&access_scope=owned"] = reply_json(
        {"sessions": []}
    )
    with RestClient(base_url=here.url, api_key="tml-fork") as rest:
        rest.list_sessions().result(5)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rest.list_sessions().result(5)
                RestClient(base_url=here.url, api_key="tml-fork").list_sessions().result(5)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        rest.list_sessions().result(5)
    assert len(here.requests) == 4


def test_keys_are_in_no_repr(here: Service) -> None:
    with RestClient(base_url=here.url, api_key="tml-secret") as rest:
        assert repr(rest) == f"RestClient(base_url={here.url!r})"
        assert "tml-secret" not in repr(rest.holder)
        assert "tml-secret" not in repr(dict(rest_base._holders))

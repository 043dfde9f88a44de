"""OpenAPI and the page at /docs: all routes are described, and all references resolve."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from server.echo import EchoExecutor
from server.hosting import Api
from tinkex.server.api import docs_page, status_page
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.deps import describe_body
from tinkex.server.app import create_app
from tinkex.server.executor import ServedModel
from tinkex.server.settings import Settings
from tinkex.server.store import open_store
from tinkex.wire.training import OptimStepRequest

FREQUENT = (
    *("asample", "stream_sample", "forward", "forward_backward", "optim_step"),
    *("retrieve_future", "retrieve_futures"),
)


@pytest.fixture
async def page(tmp_path: Path, anyio_backend: str) -> Any:
    chosen = Settings(data=str(tmp_path))
    store = open_store(db_url=chosen.db_url, storage_url=chosen.storage_url, folder=chosen.folder)
    try:
        app = create_app(chosen, EchoExecutor(), store)
        described = app.openapi()
        yield app, described
    finally:
        store.close()


pytestmark = pytest.mark.anyio


async def test_every_route_is_described(page: Any) -> None:
    app, described = page
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        if isinstance(route, Route) and route.path.startswith("/api/")
        for method in route.methods or ()
        if method != "HEAD"
    }
    reported = {
        (path, method) for path, methods in described["paths"].items() for method in methods
    }
    assert not routes - reported


async def test_every_body_and_the_answers_of_frequent_routes_are_described(page: Any) -> None:
    app, described = page
    without = set()
    for route in app.routes:
        # A route at a second path is described once.
        described_here = isinstance(route, MessageRoute) and route.include_in_schema
        if described_here and route.methods & {"POST", "PUT"}:
            operation = described["paths"][route.path][min(route.methods).lower()]
            if "application/json" not in operation.get("requestBody", {}).get("content", {}):
                without.add(route.path.rpartition("/")[2])
    assert without == {"publish", "models", "sign_out"}
    # FastAPI would read a body without budgets.
    assert not [
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and route.body_field and not isinstance(route, MessageRoute)
    ]
    for name in FREQUENT:
        operation = described["paths"][f"/api/v1/{name}"]["post"]
        assert operation["responses"]["200"]["content"], name
    passes = described["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert passes["application/json"]["schema"]["$ref"].endswith("/ForwardBackwardRequest")
    assert "application/x-protobuf" in passes


async def test_every_reference_resolves(page: Any) -> None:
    _, described = page
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        if isinstance(value, list):
            return set().union(*map(references, value))
        return set()

    assert not references(described) - known


class Reader(HTMLParser):
    """The external resources and the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[tuple[str, dict[str, str | None]]] = []
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "link", "img", "iframe", "object") or "src" in given:
            self.loads.append((tag, given))
        self.anchors.add(given.get("id") or "")
        self.links.add(given.get("href") or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_page_loads_nothing_external_and_names_every_route(api: Api) -> None:
    async with api.http.get("/docs") as got:
        assert got.status == 200
        assert got.content_type == "text/html"
        assert "default-src 'none'" in got.headers["Content-Security-Policy"]
        whole = await got.text()
    reader = Reader()
    reader.feed(whole)
    assert reader.open == []
    assert reader.loads == []
    assert "//" not in "".join(reader.links)
    lost = {link for link in reader.links if link[:1] == "#" and link[1:] not in reader.anchors}
    assert lost == set()
    described = (await api.get("/openapi.json")).json
    for path in described["paths"]:
        assert path in reader.text
    for name in described["components"]["schemas"]:
        assert name in reader.anchors


async def test_routes_have_titles_for_people_and_typed_answers(page: Any) -> None:
    _, described = page
    operations = {
        (path, method): operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }
    titles = [operation["summary"] for operation in operations.values()]
    assert len(set(titles)) == len(titles)
    assert operations["/api/v1/healthz", "get"]["summary"] == "Health check"
    assert operations["/api/v1/training_runs", "get"]["summary"] == "List training runs"
    # In sentence case, without names of functions.
    assert not [title for title in titles if not re.fullmatch(r"[A-Z][a-z]+[a-z, ]*", title)]
    listed = operations["/api/v1/training_runs", "get"]["responses"]["200"]["content"]
    assert listed["application/json"]["schema"]["$ref"].endswith("/TrainingRunsResponse")
    # A file is not JSON of any type.
    download = operations["/api/v1/downloads/{version_id}/{file}", "get"]["responses"]["200"]
    assert "content" not in download


async def test_the_page_shows_the_errors_of_all_routes_once(page: Any) -> None:
    _, described = page
    text = docs_page.page(described)
    for words in ("Over a limit; retry later", "Unknown key", "Malformed"):
        assert text.count(words) == 1
    # For programs, each route has them.
    assert "429" in described["paths"]["/api/v1/healthz"]["get"]["responses"]


def test_descriptions_are_escaped_on_the_page() -> None:
    hostile = "<script>alert(1)</script>"
    described = {
        "info": {"title": hostile, "description": hostile},
        "paths": {f"/{hostile}": {"get": {"summary": hostile, "responses": {}}}},
        "components": {"schemas": {hostile: {"properties": {hostile: {"default": hostile}}}}},
    }
    reader = Reader()
    reader.feed(docs_page.page(described))
    assert reader.loads == []


def test_the_status_page_is_valid_and_escapes_names() -> None:
    hostile = "<script>alert(1)</script>"
    text = status_page.page(
        url=f"http://{hostile}",
        models=[ServedModel(name=hostile, folder=Path("/"), max_context_length=8192)],
        needs_keys=False,
        problem=hostile,
    )
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.loads == []
    assert "8,192" in text
    assert "tml-local" in text
    assert "YOUR-KEY" in status_page.page(url="http://x", models=[], needs_keys=True, problem=None)


@pytest.mark.parametrize("described", [False, True])
def test_a_route_that_fastapi_calls_has_no_body(described: bool) -> None:
    """FastAPI would read it without budgets."""

    async def with_body(message: OptimStepRequest, limit: int = 1) -> None: ...

    async def without_body(limit: int = 1) -> None: ...

    dependencies = [describe_body(OptimStepRequest)] if described else []
    with pytest.raises(AssertionError, match="FastAPI would read the body"):
        MessageRoute("/x", without_body if described else with_body, dependencies=dependencies)

"""The page at /docs: every route is on it, the hot ones too, and every reference leads somewhere."""

from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from server.echo import EchoExecutor
from tinkex.server.app import HOT_ROUTES, create_app
from tinkex.server.openapi import HOT_PATHS
from tinkex.server.settings import Settings
from tinkex.server.store import open_store


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
    told = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert not routes - told


async def test_the_hot_routes_are_described_with_what_they_take_and_give(page: Any) -> None:
    _, described = page
    assert set(HOT_ROUTES) == set(HOT_PATHS)
    for path in HOT_ROUTES:
        operation = described["paths"][path]["post"]
        assert "application/json" in operation["requestBody"]["content"], path
        assert operation["responses"]["200"]["content"], path
    passes = described["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert "application/x-protobuf" in passes


async def test_every_reference_leads_somewhere(page: Any) -> None:
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

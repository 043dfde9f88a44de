"""The page at `/`, for a person with a browser: what this server is, and how to connect to it."""

from collections.abc import Sequence
from html import escape
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tinkex.server.api.auth import authenticator_of
from tinkex.server.api.deps import context_of
from tinkex.server.api.docs_page import HEADERS, STYLE
from tinkex.server.api.operations import not_ready_reason
from tinkex.server.executor import ServedModel
from tinkex.server.store import StorageError


async def status(request: Request) -> Response:
    """The page at `/`. It needs no key, so it shows nothing about owners and their work."""
    context = context_of(request)
    try:
        needs_keys = await authenticator_of(request).needs_keys()
    except StorageError:
        needs_keys = True
    text = page(
        url=(context.settings.public_url or str(request.base_url)).rstrip("/"),
        models=context.executor.served,
        needs_keys=needs_keys,
        problem=not_ready_reason(request),
    )
    return HTMLResponse(text, headers=HEADERS)


def page(*, url: str, models: Sequence[ServedModel], needs_keys: bool, problem: str | None) -> str:
    """The HTML page."""
    rows = "".join(
        f"<tr><td><code>{escape(model.name)}</code></td><td>{escape(model.arch)}</td>"
        f"<td>{f'{model.max_context_length:,}' if model.max_context_length else ''}</td></tr>"
        for model in models
    )
    key = "YOUR-KEY" if needs_keys else "tml-local"
    about_keys = (
        "This server needs an API key. Its administrator creates one with "
        "<code>tinkex key create</code>."
        if needs_keys
        else "This server has no keys: any text that begins with <code>tml-</code> works."
    )
    state = "Ready." if problem is None else f"<strong>Not ready:</strong> {escape(problem)}"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>tinkex</title><style>{STYLE}</style></head><body>"
        "<h1>tinkex</h1>"
        f"<p>A self-hosted server of the Tinker training API, version {escape(version('tinkex'))}. "
        f"{state}</p>"
        "<h2>Models</h2>"
        f"<table><tr><th>Name</th><th>Architecture</th><th>Context</th></tr>{rows}</table>"
        "<h2>Connect</h2>"
        "<p>With tinkex or the official SDK, in the shell of your program:</p>"
        f"<pre><code>export TINKER_BASE_URL={escape(url)}\nexport TINKER_API_KEY={key}</code></pre>"
        f"<p>{about_keys}</p>"
        "<h2>More</h2>"
        "<ul><li><a href='docs'>All routes</a> "
        "(<a href='openapi.json'>openapi.json</a> for programs)</li>"
        "<li><a href='readyz'>readyz</a>: whether the server can accept work</li>"
        "<li><a href='metrics'>metrics</a> for Prometheus</li></ul>"
        "</body></html>\n"
    )

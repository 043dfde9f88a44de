"""
The page at /docs: all routes and schemas.

It is plain HTML without scripts: it works without a network, and no third-party script can tamper
with it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tinkex.server.api.openapi import REFUSALS

#: The page loads and runs nothing, and cannot be framed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
code, .method { font: 0.9em ui-monospace, monospace; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
details { margin: 0.4rem 0; padding: 0.3rem 0.6rem; border: 1px solid #ddd; border-radius: 4px; }
summary { cursor: pointer; overflow-wrap: anywhere; }
.method { font-weight: bold; text-transform: uppercase; }
.about { color: #666; }
table { border-collapse: collapse; margin: 0.4rem 0; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
tr + tr { border-top: 1px solid #eee; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; }
  a { color: #8ab4f8; }
  h2, details, tr + tr { border-color: #444; }
  .about { color: #999; }
}
"""

SchemaLike = Mapping[str, Any]


async def docs(request: Request) -> Response:
    """The page at /docs: all routes and schemas."""
    return HTMLResponse(page(request.app.openapi()), headers=HEADERS)


def page(described: SchemaLike) -> str:
    """The HTML page of an OpenAPI description."""
    about = described["info"]
    schemas = described.get("components", {}).get("schemas", {})
    return "".join(
        (
            (
                "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
                "<meta name='viewport' content='width=device-width'>"
                f"<title>{escape(about['title'])}</title><style>{STYLE}</style></head><body>"
            ),
            f"<h1>{escape(about['title'])}</h1><p>{escape(about.get('description', ''))} ",
            "For programs: <a href='openapi.json'>openapi.json</a>.</p>",
            "<h2 id='errors'>Errors of all routes</h2>",
            "<p>The body of each is an <a href='#ErrorDetail'><code>ErrorDetail</code></a>.</p>",
            _table(("Status", ""), ((status, escape(text)) for status, text in REFUSALS.items())),
            *_routes(described["paths"]),
            "<h2 id='schemas'>Schemas</h2>",
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
            "</body></html>\n",
        )
    )


def _routes(paths: SchemaLike) -> Iterator[str]:
    by_tag: defaultdict[str, list[str]] = defaultdict(list)
    for path, methods in sorted(paths.items()):
        for method, operation in methods.items():
            (tag, *_) = operation.get("tags") or ["other"]
            by_tag[tag].append(_operation(method, path, operation))
    for tag, operations in sorted(by_tag.items()):
        yield f"<h2 id='{escape(tag)}'>{escape(tag.capitalize())}</h2>"
        yield from operations


def _operation(method: str, path: str, operation: SchemaLike) -> str:
    parts = [
        (
            f"<details><summary><span class='method'>{escape(method)}</span> "
            f"<code>{escape(path)}</code> "
            f"<span class='about'>{escape(operation.get('summary', ''))}</span></summary>"
        )
    ]
    if text := operation.get("description"):
        parts.append(f"<p>{escape(text)}</p>")
    if parameters := operation.get("parameters"):
        rows = (
            (one["name"], _type(one.get("schema", {})), _about(one, required=one.get("required")))
            for one in parameters
        )
        parts.append(_table(("Parameter", "Type", ""), rows))
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body: {_content(body.get('content', {}))}</p>")
    rows = (
        (status, _content(response.get("content", {})), escape(response.get("description", "")))
        for status, response in sorted(operation.get("responses", {}).items())
        # One table above has these.
        if response.get("description") != REFUSALS.get(status)
    )
    parts.append(_table(("Response", "", ""), rows))
    return "".join((*parts, "</details>"))


def _schema(name: str, schema: SchemaLike) -> str:
    required = set(schema.get("required", ()))
    fields = [
        (field, _type(one), _about(one, required=field in required))
        for field, one in schema.get("properties", {}).items()
    ]
    body = _table(("Field", "Type", ""), fields) if fields else f"<p>{_type(schema)}</p>"
    about = escape(schema.get("description", ""))
    return (
        f"<details id='{escape(name)}' open><summary><code>{escape(name)}</code> "
        f"<span class='about'>{about}</span></summary>{body}</details>"
    )


def _about(one: SchemaLike, *, required: bool | None) -> str:
    parts = [escape(one.get("description", ""))]
    if required:
        parts.append("required")
    default = one.get("default", one.get("schema", {}).get("default"))
    if default is not None:
        parts.append(f"default <code>{escape(repr(default))}</code>")
    return ", ".join(part for part in parts if part)


def _content(content: SchemaLike) -> str:
    return ", ".join(
        f"{_type(one.get('schema', {}))} <span class='about'>{escape(kind)}</span>"
        for kind, one in content.items()
    )


def _type(schema: Any) -> str:
    """A short description of a type, with links to its schemas."""
    if not isinstance(schema, Mapping) or not schema:
        return "any"
    if target := schema.get("$ref"):
        name = target.rpartition("/")[2]
        return f"<a href='#{escape(name)}'><code>{escape(name)}</code></a>"
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return " or ".join(_type(one) for one in schema[choice])
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(one))}</code>" for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items'))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"map of string to {_type(schema['additionalProperties'])}"
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; the first cell of each row is plain text, the others are HTML."""
    lines = "".join(
        f"<tr><td><code>{escape(name)}</code></td>{''.join(f'<td>{cell}</td>' for cell in cells)}"
        "</tr>"
        for name, *cells in rows
    )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{lines}</table>"

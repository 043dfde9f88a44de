"""
The console's files, and its sign-in.

The pages are static: `index.html` and ES modules in `tinkex/server/console`, read from disk for every
request, so that a changed file needs a reload of the page only. They contain no data. What they show
comes from the routes below `/api/v1`, with a cookie that signing in sets.
"""

import gzip
import hashlib
from functools import lru_cache
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api import status_page
from tinkex.server.api.auth import (
    authenticator_of,
    cookie_name,
    refuse_cross_site,
    require_own_origin,
)
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.deps import context_of, describe_body, json_response
from tinkex.server.api.errors import Refusal
from tinkex.server.store.keys import SIGNED_IN_S
from tinkex.wire.base import StrictModel
from tinkex.wire.codec import decode_json

router = APIRouter(prefix="/api/v1/console", tags=["console"], route_class=MessageRoute)

FOLDER = Path(__file__).parents[1] / "console"
HEADERS = {
    # Scripts and styles are files of this server; nothing is inline, and nobody may frame a page.
    "Content-Security-Policy": "default-src 'self'; base-uri 'self'; object-src 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser asks each time whether its copy is still right.
    "Cache-Control": "no-cache",
}
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
# The body of a sign-in is read before the caller is known.
MAX_SIGN_IN_BYTES = 4096


class SignInRequest(StrictModel):
    #: An API key of this server.
    key: str


async def home(request: Request) -> Response:
    """The console for a browser; for programs, a short page about this server."""
    if "text/html" in request.headers.get("accept", ""):
        return await page(request)
    return await status_page.status(request)


async def page(request: Request) -> Response:
    """Any page of the console: the same file, whose script reads the address."""
    # Below a proxy's path, links of the page begin with that path.
    base = urlsplit(context_of(request).settings.public_url).path.rstrip("/")
    html = (FOLDER / "index.html").read_bytes()
    html = html.replace(b'<base href="/"', f'<base href="{escape(base)}/"'.encode())
    return _answer(request, html, "text/html", vary="Accept, Accept-Encoding")


async def file(request: Request) -> Response:
    """A file of the console."""
    name: str = request.path_params["file"]
    # Only files that are there: no path leads out of the folder.
    files = {one.relative_to(FOLDER).as_posix(): one for one in FOLDER.rglob("*") if one.is_file()}
    path = files.get(name)
    if path is None:
        raise Refusal(404, f"the console has no file {name[:200]!r}.")
    return _answer(request, path.read_bytes(), TYPES.get(path.suffix, "text/plain"))


def _answer(
    request: Request, content: bytes, media_type: str, *, vary: str = "Accept-Encoding"
) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag, "Vary": vary}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        content = _compressed(content)
    return Response(content, media_type=media_type, headers=headers)


@lru_cache(maxsize=64)
def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


@router.post("/sign_in", dependencies=[describe_body(SignInRequest)])
async def sign_in(request: Request) -> Response:
    """Set the cookie of the console for a key, which is in the body and never in an address."""
    require_own_origin(request)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_SIGN_IN_BYTES:
            raise Refusal(413, f"a sign-in has at most {MAX_SIGN_IN_BYTES} bytes.")
    secret = decode_json(SignInRequest, body).key.strip()
    authenticator = authenticator_of(request)
    if not await authenticator.needs_keys():
        refuse_cross_site(request.headers)
        return json_response({})
    key = await authenticator.key_to_sign_in(secret)
    cookie = await context_of(request).store.keys.sign_in(key)
    response = json_response({})
    response.set_cookie(
        cookie_name(request),
        cookie,
        max_age=int(SIGNED_IN_S),
        httponly=True,
        samesite="strict",
        secure=_is_https(request),
    )
    return response


@router.post("/sign_out")
async def sign_out(request: Request) -> Response:
    """End the session of this browser; its cookie is not valid any more."""
    name = cookie_name(request)
    if cookie := request.cookies.get(name):
        await context_of(request).store.keys.sign_out(cookie)
        authenticator_of(request).forget()
    response = json_response({})
    response.delete_cookie(name, httponly=True, samesite="strict", secure=_is_https(request))
    return response


def _is_https(request: Request) -> bool:
    public = context_of(request).settings.public_url
    return request.url.scheme == "https" or public.startswith("https:")

"""What a client may ask about its own key, and the exchange of a key for a token."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import caller_of, gate_of
from tinkex.server.api.context import answer, context_of
from tinkex.server.api.errors import Refusal

router = APIRouter(prefix="/api/v1/auth", tags=["keys"])
unauthed = APIRouter(prefix="/api/unauthed", tags=["keys"])

# Official clients read tokens whose issuer begins with `passport-`.
ISSUER = "passport-tinkex"
NO_LOGIN = (
    "this server has no login in a browser. Whoever runs it makes keys with `tinkex key create`; "
    "set TINKER_API_KEY to yours."
)


@router.post("/token")
async def exchange(request: Request) -> Response:
    """A token that stands for the key of this request until it expires."""
    caller = caller_of(request)
    if caller.by_token:
        raise Refusal(
            400, "a token cannot be exchanged for another one. Send the API key itself (tml-…)."
        )
    now_s = time.time()
    claims = {
        "iss": ISSUER,
        "sub": f"tml:user:{caller.owner}",
        "org_id": caller.project_id or "tinkex",
        "email": "",
        "key_id": caller.key_id or 0,
        "iat": int(now_s),
        "exp": int(now_s + context_of(request).settings.jwt_s),
    }
    return answer({"jwt": gate_of(request).tokens.make(claims)})


@router.get("/apikey/me")
async def key_info(request: Request) -> Response:
    caller = caller_of(request)
    return answer(
        {
            "key_id": caller.key_id or 0,
            "name": caller.name,
            "note": "" if caller.key_id else "this server has no keys: everybody is `local`",
            "details": {
                "org_details": {"name": caller.project_id or "tinkex"},
                "user_details": {"email": caller.owner},
            },
        }
    )


@router.delete("/apikey/me")
async def revoke_key(request: Request) -> Response:
    """The key of this request opens nothing any more, from the next request on."""
    caller = caller_of(request)
    if caller.by_token:
        # It lasts an hour, and would end the key for good.
        raise Refusal(
            403,
            "a token cannot revoke the key that it stands for. Send the API key itself (tml-…), or "
            "ask whoever runs this server: `tinkex key revoke`.",
        )
    if caller.key_id is not None:
        await context_of(request).store.keys.revoke(caller.key_id)
        gate_of(request).forget()
    return answer({})


@router.post("/apikey")
async def create_key(_request: Request) -> Response:
    raise Refusal(403, NO_LOGIN)


@unauthed.get("/auth-config")
async def login_config(_request: Request) -> Response:
    raise Refusal(404, NO_LOGIN)

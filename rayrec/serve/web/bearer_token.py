"""A secret that callers have to know: `Authorization: Bearer TOKEN`, as RFC 6750 has it.

Health probes need no token, since what starts and stops services asks them; so they tell that there is a
service, and its model's name. Everything else needs the token: answers, descriptions (/docs),
/metrics and the page. (A browser sends no token by itself: the page is then for a gateway that adds it.)

What does not reach the application is answered by what is in front of it. HAProxy and Ray Serve's proxy say
at `/-/healthz` whether there are replicas. Where there is a token, HAProxy does not answer `/-/routes`
(`haproxy_config.py`); Serve's proxy, and the HAProxy of a cluster that is joined, tell anybody the routes.

Processes of Ray get the token's SHA-256 and not the token: it is in no process's settings, in no memory that
others of the cluster see, and in no log.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from rayrec.serve.web.guards import RequestGuard
from rayrec.serve.wire.errors import error_response

logger = logging.getLogger(__name__)

NO_TOKEN = "this service needs its token, sent with the header 'Authorization: Bearer TOKEN'"
OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"})


def require_token(api: FastAPI, digest: str | None) -> None:
    """From now on; None requires none."""
    if digest is None:
        return
    # Inside of what counts and guards requests, which has those that are refused, too; in front of all else,
    # such as what knows callers by what they say.
    kinds: list[Any] = [each.cls for each in api.user_middleware]
    index = kinds.index(RequestGuard) + 1 if RequestGuard in kinds else 0
    api.user_middleware.insert(index, Middleware(BearerToken, digest=digest))


class BearerToken:
    """ASGI middleware: status 401 for requests without the token."""

    def __init__(self, app: ASGIApp, digest: str) -> None:
        self._app = app
        self._digest = digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._admits(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            presented = "authorization" in Headers(scope=scope)
            challenge = 'Bearer realm="rayrec"' + (', error="invalid_token"' if presented else "")
            answer = error_response(scope["path"], 401, NO_TOKEN, headers={"WWW-Authenticate": challenge})
            await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        return has_token(Headers(scope=scope).get("authorization", ""), self._digest)


def has_token(authorization: str, digest: str) -> bool:
    """Whether a header has the token.

    Args:
        authorization: the header, whose characters are bytes; empty where there is none.
        digest: SHA-256 of the token, in hexadecimal digits.
    """
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer":
        return False
    # Of digests, in constant time: neither says how much of a wrong token is right, nor its length.
    found = hashlib.sha256(token.strip().encode("latin-1")).digest()
    return hmac.compare_digest(found, bytes.fromhex(digest))

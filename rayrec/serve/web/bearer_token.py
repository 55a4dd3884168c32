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
import os
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from rayrec.platform.errors import InputError
from rayrec.serve.web.guards import RequestGuard
from rayrec.serve.wire.errors import error_response

logger = logging.getLogger(__name__)

VARIABLE = "RAYREC_SERVE_TOKEN"
MIN_LENGTH = 16
"""Characters: a shorter one could be guessed."""
OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"})

_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


def token_digest(file: Path | None, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """SHA-256, in hexadecimal, of the token in the file or the environment; None where neither has one.

    Takes the variable out of the environment, which processes that are started later inherit.

    Raises:
        InputError: both have one, it cannot be read, or it is none.
    """
    told = environment.pop(VARIABLE, None)
    if file is None and told is None:
        return None
    if file is None:
        source, token = VARIABLE, told or ""
    elif told is not None:
        raise InputError(f"both --token-file and {VARIABLE} are there; give the token once")
    else:
        source = f"--token-file {file}"
        try:
            token = file.read_text(encoding="ascii")
        except OSError as error:
            raise InputError(f"{source}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{source}: expected a token of ASCII characters") from error
        if file.stat().st_mode & 0o077:
            logger.warning("%s: others may read or change the token; chmod 600 would stop that", file)
    token = token.strip()
    # Never the token itself in a message: it goes to logs.
    if len(token) < MIN_LENGTH or not _TOKEN.fullmatch(token):
        raise InputError(
            f"{source}: expected a token of at least {MIN_LENGTH} letters, digits and -._~+/, and found "
            f"something else of {len(token)} characters; 'openssl rand -hex 32' makes one"
        )
    return hashlib.sha256(token.encode()).hexdigest()


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
        self._digest = bytes.fromhex(digest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._admits(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            presented = "authorization" in Headers(scope=scope)
            challenge = 'Bearer realm="rayrec"' + (', error="invalid_token"' if presented else "")
            sentence = "this service needs its token, sent with the header 'Authorization: Bearer TOKEN'"
            answer = error_response(scope["path"], 401, sentence, headers={"WWW-Authenticate": challenge})
            await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Of digests, in constant time: neither says how much of a wrong token is right, nor its length.
        found = hashlib.sha256(token.strip().encode("latin-1")).digest()
        return hmac.compare_digest(found, self._digest)

"""What keeps web pages of others from a service that their visitors can reach.

A browser sends a page's requests to any address that its machine reaches, loopback among them. A page cannot
read the answer of another origin, but a form's post has its effect; and a name that its owner lets point to
127.0.0.1 a moment later (DNS rebinding) makes the service the page's own origin, so that it reads answers,
too.

    Host           of a service on loopback without a token: a name of this machine, or one that was allowed
    Origin,        of requests that change or compute something: the page is the service's own, or was allowed
    Sec-Fetch-Site
    Content-Type   of bodies: none that a form can send, so that a browser asks first (CORS), and hears no

Callers that are no browsers send neither Origin nor Sec-Fetch-Site, and notice nothing of the second rule.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.web.guards import RequestGuard
from rayrec.serve.wire.errors import error_response

FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
"""That a page of any origin may send without asking (Fetch standard, CORS-safelisted request headers)."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def keep_pages_out(api: FastAPI, config: ServeConfig) -> None:
    """From now on, answer as the table above says."""
    kinds: list[Any] = [each.cls for each in api.user_middleware]
    index = kinds.index(RequestGuard) + 1 if RequestGuard in kinds else 0
    # A page does not know the token, so whose name the service has for it does not matter.
    checks_hosts = config.is_loopback and config.token_sha256 is None
    api.user_middleware.insert(
        index, Middleware(BrowserGuard, allowed_hosts=config.allowed_hosts, checks_hosts=checks_hosts)
    )


class BrowserGuard:
    """ASGI middleware: status 403 for pages and names of others, 415 for what a form sends."""

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] = (), checks_hosts: bool = True) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_hosts)
        self._checks_hosts = checks_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, sentence = refusal
        await error_response(scope["path"], status, sentence)(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._checks_hosts and not self._is_known(_name_of(f"//{host}")):
            return 403, (
                f"the service is on this machine alone, and the request asks for the host {host!r}; ask for "
                "localhost or the address, or allow the name with --allowed-host"
            )
        if scope["method"] in _SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin is not None:
            # Scheme and all: behind something that speaks TLS for the service, the scheme is another one.
            is_own = bool(host) and _netloc_of(origin) == host.lower()
            if not is_own and _name_of(origin) not in self._allowed:
                return 403, (
                    f"a page of {origin!r} sent this, which is not the service's own; allow its host with "
                    "--allowed-host, if it is yours"
                )
        elif headers.get("sec-fetch-site") == "cross-site":
            return (
                403,
                "a page of somebody else's sent this; use a program, or the service's own page",
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in FORM_TYPES:
            return 415, (
                f"the body comes as {kind!r}, as forms of web pages send it; send JSON with the header "
                "'Content-Type: application/json' (curl --json)"
            )
        return None

    def _is_known(self, name: str) -> bool:
        if name in self._allowed or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _netloc_of(url: str) -> str:
    """Host and port of a URL; empty where there is none."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:  # such as half an IPv6 address
        return ""


def _name_of(url: str) -> str:
    """Host of a URL without its port; empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # such as half an IPv6 address
        return ""

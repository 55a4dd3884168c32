"""A page of the cluster: nodes, cards, health, who holds what, and queues.

    GET /            the page: one file, nothing is built and nothing loaded from elsewhere
    GET /v1/cluster  what it shows, as JSON

It changes nothing, and is meant for operators: by default only this machine reaches it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rayrec.jobs.view import ClusterView

KEPT_S = 1.0
"""For so long all who look see the same view: Ray is not asked by each of them."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
    "Cache-Control": "no-cache",
}


def build_page(
    look: Callable[[], ClusterView], hosts: list[str], clock: Callable[[], float] = time.monotonic
) -> FastAPI:
    """The application.

    Args:
        look: puts the view together; what it raises is shown as one sentence.
        hosts: names under which it answers: another name in a browser is another site's doing.
    """
    app = FastAPI(title="RayRec cluster", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    page = files("rayrec.jobs").joinpath("cluster_page.html").read_text()
    lock, seen = threading.Lock(), list[tuple[float, dict[str, Any]]]()

    @app.get("/", response_class=HTMLResponse)
    def shown() -> HTMLResponse:
        return HTMLResponse(page, headers=_HEADERS)

    @app.get("/v1/cluster")
    def cluster() -> JSONResponse:
        with lock:
            try:
                if not seen or clock() - seen[0][0] >= KEPT_S:
                    seen[:] = [(clock(), look().to_json())]
            except Exception as error:
                seen.clear()
                return JSONResponse({"error": str(error)}, 503)
            return JSONResponse(seen[0][1])

    return app

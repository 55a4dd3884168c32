"""What Ray Serve's calls between deployments cost when nobody does anything.

HTTP ─► first ─► second ─► third        POST /2, BYTES there and back
HTTP ─► first                           POST /0
"""

from __future__ import annotations

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from benchmarks.own_serve import deployment
from rayrec.serve.on_ray.ray_ingress import by_message

NO_CALLS, TWO_CALLS = "/0", "/2"
BYTES = 2000
"""Of a message: about what a packed batch of one history has."""


class Last:
    """Gives back what it is given."""

    async def take(self, body: bytes) -> bytes:
        return body


class Middle:
    """Asks another one."""

    def __init__(self, next_one: DeploymentHandle) -> None:
        self._next = by_message(next_one)

    async def take(self, body: bytes) -> bytes:
        taken: bytes = await self._next.take.remote(body)
        return taken


class First:
    """Answers with the size of what came back."""

    def __init__(self, next_one: DeploymentHandle) -> None:
        handle = by_message(next_one)

        async def ready(request: Request) -> Response:
            return PlainTextResponse("ready")

        async def alone(request: Request) -> Response:
            await request.body()
            return PlainTextResponse("0")

        async def asking(request: Request) -> Response:
            await request.body()
            return PlainTextResponse(str(len(await handle.take.remote(bytes(BYTES)))))

        self._api = Starlette(
            routes=[
                Route("/health/ready", ready),
                Route(NO_CALLS, alone, methods=["POST"]),
                Route(TWO_CALLS, asking, methods=["POST"]),
            ]
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Ray Serve after the constructor."""
        return self._api


def application() -> serve.Application:
    last = deployment(Last, cpus=0.1)
    return deployment(serve.ingress()(First), deployment(Middle, last, cpus=0.1), cpus=0.1)

"""Several models in one service: each has a whole application, and the first hands on what names another.

    request ─► ByModel ─┬ /models/NAME/...     ─► application of NAME, which sees the rest of the path
                        ├ /v2/models/NAME/...  ─► application of NAME
                        └ all else             ─► the first application

So each model has limits, deadlines, steps under load, a batcher, a log and metrics of its own, by the same
code as a service of it alone. What is asked of the service, such as its index of models, their statistics and
all metrics, the first application answers for all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.web.api import Answering
from rayrec.serve.web.bearer_token import require_token
from rayrec.serve.web.browsers import keep_pages_out
from rayrec.serve.web.metrics import PrometheusMeter

_OWN, _PROTOCOL = "/models/", "/v2/models/"
_DESCRIPTIONS = frozenset({"docs", "redoc", "openapi.json"})


def together(applications: Sequence[FastAPI]) -> FastAPI:
    """The first application, which answers for the others as well.

    Args:
        applications: of `build_api`, each with a name of its own.
    """
    first, *others = applications
    if not others:
        return first
    behind: list[Answering] = [each.state.answering for each in applications]
    behind[0].inference.beside = [each.inference for each in behind[1:]]
    shown, *beside = [
        [meter for meter in each.meters if isinstance(meter, PrometheusMeter)] for each in behind
    ]
    for meter in shown:
        meter.beside = [other for meters in beside for other in meters]
    by_name = {each.inference.name: api for each, api in zip(behind, applications, strict=True)}
    first.add_middleware(ByModel, first=first, by_name=by_name)
    first.state.others = others
    lifespans = [each.router.lifespan_context for each in applications]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for begin, each in zip(lifespans, applications, strict=True):
                await stack.enter_async_context(begin(each))
            yield

    first.router.lifespan_context = lifespan
    return first


def applications_of(api: FastAPI) -> list[FastAPI]:
    """Those that `together` has put behind one, itself first."""
    return [api, *getattr(api.state, "others", ())]


def protect(api: FastAPI, config: ServeConfig) -> None:
    """From now on, each of the applications asks for the token, and keeps pages of others out."""
    for each in applications_of(api):
        require_token(each, config.token_sha256)
        keep_pages_out(each, config)


class ByModel:
    """ASGI middleware of the first application, outside of everything else of it."""

    def __init__(self, app: ASGIApp, first: FastAPI, by_name: Mapping[str, FastAPI]) -> None:
        # What is within this one is not the application, whose way in leads here again.
        self._app = app
        self._within = {name: app if each is first else each for name, each in by_name.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        app = self._app
        if path.startswith(_OWN):
            name, slash, rest = path.removeprefix(_OWN).partition("/")
            if slash and name in self._within:
                app = self._within[name]
                scope = {**scope, "path": f"/{rest}"}
                if rest in _DESCRIPTIONS:  # which say where they are; mounted files are below any root
                    scope["root_path"] = f"{scope.get('root_path', '')}{_OWN}{name}"
        elif path.startswith(_PROTOCOL):
            app = self._within.get(path.removeprefix(_PROTOCOL).partition("/")[0], app)
        await app(scope, receive, send)

"""From a request to its answer: which model, whose limits, and what becomes of callers that leave.

    body ─► model ─► read ─► room at the engine? ─► limits ─► whole answer, or events ─► slots are free again

Limits come before a template is rendered, a grammar compiled or another service asked: a caller that sends
too much costs no more than reading it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rayrec.serve.admission.limits import Admissions
from rayrec.serve.admission.request_info import RequestInfo, address_of
from rayrec.serve.language.served import Call, Kind, ServedModel, Values
from rayrec.serve.wire.errors import RequestError, error_response

Result = TypeVar("Result")


@dataclass(frozen=True)
class Admitted:
    """A request that holds its slots, until its answer is there or its caller gone."""

    name: str
    """That the caller asked for, which is what it is told."""
    call: Call
    expires_at: float
    release: Callable[[], None]

    async def whole(self, http: Request) -> dict[str, Any]:
        """The answer."""
        try:
            return {**await unless_gone(http, self.call.whole(self.expires_at)), "model": self.name}
        finally:
            self.release()

    async def values(self, http: Request) -> Values:
        """The chunks of the answer; slots are free when they end or are closed, see `events`."""
        try:
            return self._named(await unless_gone(http, self.call.stream(self.expires_at)))
        except BaseException:
            self.release()
            raise

    async def _named(self, values: Values) -> Values:
        async with aclosing(values):
            async for value in values:
                yield {**value, "model": self.name}


class LanguageModels:
    """The models of a service, with the limits of each; on one event loop."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.settings.name: model for model in models}
        self._admissions = {
            name: Admissions(model.settings.service, model.settings.callers, monotonic)
            for name, model in self.models.items()
        }

    @property
    def names(self) -> list[str]:
        """What callers may ask for."""
        return list(self.models)

    def model(self, name: Any) -> ServedModel:
        """A model by its name.

        Raises:
            RequestError: there is none (404).
        """
        if not isinstance(name, str):
            raise RequestError("model: expected the name of a model", param="model")
        if name not in self.models:
            known = ", ".join(map(repr, self.models))
            raise RequestError(
                f"there is no model {name[:100]!r}; here are {known}",
                404,
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    def admit(self, http: Request, kind: Kind, body: Mapping[str, Any]) -> Admitted:
        """Take the slots of a request, all or none.

        Raises:
            RefusedError: too many requests of the caller, or of all.
            RequestError: there is no such model, it cannot answer that, or more answers are asked for than
                are ever admitted together.
        """
        model = self.model(body.get("model"))
        settings = model.settings
        info = RequestInfo.of(http.headers, address_of(http), settings.callers.header, settings.timeout_s)
        call = model.read(kind, body)
        admissions = self._admissions[settings.name]
        most = admissions.most_at_once
        if most is not None and call.count > most:
            raise RequestError(f"{call.count} answers in one request; ask for 1 to {most}")
        call.check_room()
        releases = admissions.admit_all(info.caller, call.count)

        def release() -> None:
            for each in releases:
                each()

        return Admitted(settings.name, call, info.expires_at, release)


async def unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """The result of some work, which ends when the caller goes away.

    Raises:
        RequestError: the caller has gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError("the caller has gone", 499)
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class _Releasing(StreamingResponse):
    """Releases slots when it ends, even if nobody listened to its beginning."""

    values: AsyncGenerator[Any, None]
    release: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self.values.aclose()
            finally:
                self.release()


def events(
    http: Request, admitted: Admitted, values: AsyncGenerator[Any, None], last: str | None
) -> StreamingResponse:
    """Server-sent events, each a JSON value; an error that comes too late for a status is the last of
    them."""

    async def lines() -> AsyncIterator[str]:
        try:
            async with aclosing(values):
                async for value in values:
                    yield f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
        except Exception as error:
            status = error.status if isinstance(error, RequestError) else 500
            answer = error_response(http.url.path, status, f"the answer could not be ended: {error}")
            yield f"data: {bytes(answer.body).decode()}\n\n"
            return
        if last is not None:
            yield f"data: {last}\n\n"

    response = _Releasing(
        lines(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
    response.values, response.release = values, admitted.release
    return response

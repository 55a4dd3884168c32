"""From a request to its answer: which model, whose limits, and what becomes of callers that leave.

    body ─► name ─► model, by share ─► read ─► room at the engine? ─► limits ─► whole answer, or events
                └ a copy for the shadow                              log ◄─┴─► slots are free again

Limits come before a template is rendered, a grammar compiled or another service asked: a caller that sends
too much costs no more than reading it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rayrec.serve.admission.limits import Admissions
from rayrec.serve.admission.request_info import RequestInfo, address_of
from rayrec.serve.config.admission import USER_HEADER, CallersConfig
from rayrec.serve.events.request_log import REQUEST_ID, request_id_of
from rayrec.serve.language.config import SharedNameConfig
from rayrec.serve.language.outcomes import Outcome
from rayrec.serve.language.request_log import ChatLog
from rayrec.serve.language.served import Call, Kind, ServedModel, Values
from rayrec.serve.language.sharing import SharedName
from rayrec.serve.routing.targets import TARGET
from rayrec.serve.web.guards import OVERLOAD_ERRORS
from rayrec.serve.wire.errors import RequestError, error_response

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_CALLER = CallersConfig().header
"""By which callers without a user keep a model: which model's settings hold is not known yet."""


@dataclass(frozen=True)
class Admitted:
    """A request that holds its slots, until its answer is there or its caller gone."""

    name: str
    """That the caller asked for, which is what it is told."""
    call: Call
    expires_at: float
    outcome: Outcome
    headers: Mapping[str, str]
    """Of the answer."""
    _release: Callable[[], None]
    _begun: list[Values] = field(default_factory=list)

    def release(self, error: BaseException | None = None) -> None:
        """Free the slots, and say what became of the request; once."""
        self._release()
        self.outcome.end(error)

    async def close(self) -> None:
        """End what was begun, though nobody has listened to it, and free the slots."""
        try:
            for values in self._begun:
                await values.aclose()
        finally:
            self.release(GeneratorExit())  # of an answer that has ended, this says nothing more

    async def whole(self, http: Request) -> dict[str, Any]:
        """The answer."""
        try:
            found = await unless_gone(http, self.call.whole(self.expires_at))
            self.outcome.add(found)
        except BaseException as error:
            self.release(error)
            raise
        self.release()
        return {**found, "model": self.name}

    async def values(self, http: Request) -> Values:
        """The chunks of the answer; slots are free when they end or are closed, see `events`."""
        try:
            self._begun.append(await unless_gone(http, self.call.stream(self.expires_at)))
            return self._observed(self._begun[-1])
        except BaseException as error:
            self.release(error)
            raise

    async def _observed(self, values: Values) -> Values:
        try:
            async with aclosing(values):
                async for value in values:
                    self.outcome.add(value)
                    yield {**value, "model": self.name}
        except BaseException as error:
            self.outcome.end(error)
            raise
        self.outcome.end(None)


class LanguageModels:
    """The models of a service, with the limits of each; on one event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        shared: Sequence[SharedNameConfig] = (),
        log: ChatLog | None = None,
    ) -> None:
        self.models = {model.settings.name: model for model in models}
        self.shared = {each.name: SharedName(each, self.models, log) for each in shared}
        self._log = log
        self._admissions = {
            name: Admissions(model.settings.service, model.settings.callers, monotonic)
            for name, model in self.models.items()
        }

    @property
    def names(self) -> list[str]:
        """What callers may ask for."""
        return [*self.models, *self.shared]

    def check_name(self, name: Any) -> str:
        """A name that callers may ask for.

        Raises:
            RequestError: there is no such model (404).
        """
        if not isinstance(name, str):
            raise RequestError("model: expected the name of a model", param="model")
        if name not in self.models and name not in self.shared:
            known = ", ".join(map(repr, self.names))
            raise RequestError(
                f"there is no model {name[:100]!r}; here are {known}",
                404,
                param="model",
                code="model_not_found",
            )
        return name

    async def why_not(self, name: str) -> str | None:
        """Why nobody would answer to a name now; None: somebody does."""
        if name in self.models:
            return await self.models[name].why_not()
        weights = self.shared[name].config.routing.weights
        asked = [self.models[each] for each, weight in weights.items() if weight > 0]
        found = await asyncio.gather(*(model.why_not() for model in asked))
        return next((why for why in found if why is not None), None)

    def admit(self, http: Request, kind: Kind, body: Mapping[str, Any]) -> Admitted:
        """Take the slots of a request, all or none.

        Raises:
            RefusedError: too many requests of the caller, or of all.
            RequestError: there is no such model, it cannot answer that, or more answers are asked for than
                are ever admitted together.
        """
        name = self.check_name(body.get("model"))
        said = body.get("user")
        user = http.headers.get(USER_HEADER) or (said if isinstance(said, str) else None)
        shared, headers = self.shared.get(name), {}
        target = name
        if shared is not None:
            caller = http.headers.get(_CALLER) or address_of(http)
            target = headers[TARGET] = shared.model_of(user, str(caller))
        model = self.models[target]
        settings = model.settings
        info = RequestInfo.of(http.headers, address_of(http), settings.callers.header, settings.timeout_s)
        call = model.read(kind, body)
        admissions = self._admissions[target]
        most = admissions.most_at_once
        if most is not None and call.count > most:
            raise RequestError(f"{call.count} answers in one request; ask for 1 to {most}")
        call.check_room()
        releases = admissions.admit_all(info.caller, call.count)

        def release() -> None:
            for each in releases:
                each()

        request_id = request_id_of(http.headers.get(REQUEST_ID))
        headers[REQUEST_ID] = request_id
        outcome = Outcome()
        if self._log is not None and self._log.wants(request_id):
            outcome.on_end.append(partial(self._log.answered, request_id, kind, body, target, user, False))
        if shared is not None:
            shared.copy(request_id, kind, body, user, outcome)
        return Admitted(name, call, info.expires_at, outcome, headers, release)

    async def close(self) -> None:
        """Give up what is at shadows, and write what is left of the log."""
        for shared in self.shared.values():
            await shared.close()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)


async def unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """The result of some work, which ends when the caller goes away.

    Raises:
        RequestError: the caller has gone.
    """
    current = asyncio.current_task()
    assert current is not None
    cancelling, is_gone, is_over = current.cancelling(), False, False

    def end(watched: asyncio.Future[None]) -> None:
        nonlocal is_gone
        if not watched.cancelled() and (error := watched.exception()) is not None:
            logger.debug("a connection cannot be read any more", exc_info=error)
        if not is_over:
            is_gone = True
            current.cancel()

    # The work is done here and only watched from another task: that is fewer steps of the loop than to wait
    # for both, and each is one that an engine's thread may delay. Cancelled as `asyncio.timeout` does.
    watching = asyncio.ensure_future(_gone(http))
    watching.add_done_callback(end)
    try:
        result = await work
    except (asyncio.CancelledError, Exception) as error:
        # Whatever the work ended with; a cancellation from elsewhere at the same time goes on.
        if is_gone and current.uncancel() <= cancelling:
            raise RequestError("the caller has gone", 499) from error
        raise
    else:
        if is_gone:  # the work let the cancellation pass
            current.uncancel()
            raise RequestError("the caller has gone", 499)
        return result
    finally:
        is_over = True
        watching.cancel()


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class _Releasing(StreamingResponse):
    """Releases slots when it ends, even if nobody listened to its beginning."""

    values: AsyncGenerator[Any, None]
    admitted: Admitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self.values.aclose()
            finally:
                await self.admitted.close()


def events(
    http: Request, admitted: Admitted, values: AsyncGenerator[Any, None], last: str | None
) -> StreamingResponse:
    """Server-sent events, each a JSON value; an error that comes too late for a status is the last of
    them."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async with aclosing(values):
                async for value in values:
                    # Here, where an error is still told, and half a character ends no answer.
                    yield f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode(errors="replace")
        except Exception as error:
            status, said, error_id = 503, str(error), None
            if isinstance(error, RequestError):
                status = error.status
            elif not isinstance(error, OVERLOAD_ERRORS):  # ours, which callers are told as elsewhere
                status, said = 500, "something failed in the service; its log says what"
                error_id = uuid.uuid4().hex[:12]
                logger.exception("a stream of %s failed, error %s", http.url.path, error_id)
            said = f"the answer could not be ended: {said}"
            answer = error_response(http.url.path, status, said, error_id)
            yield b"data: " + bytes(answer.body) + b"\n\n"
            return
        if last is not None:
            yield f"data: {last}\n\n".encode()

    response = _Releasing(
        lines(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **admitted.headers},
    )
    response.values, response.admitted = values, admitted
    return response

"""From a checked request to pieces of text: which model, whose limits, and what becomes of callers that
leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from rayrec.models.generation.sampler import Chosen
from rayrec.serve.admission.limits import Admissions
from rayrec.serve.admission.request_info import RequestInfo, address_of
from rayrec.serve.language.engine import EngineStoppedError, Prompt
from rayrec.serve.language.loading import LanguageModelHere
from rayrec.serve.language.writing import Piece, Reason
from rayrec.serve.wire.errors import RequestError, error_response, explain
from rayrec.serve.wire.request_body import json_object, unpacked_body

Wanted = TypeVar("Wanted", bound=BaseModel)
Result = TypeVar("Result")


@dataclass
class Answer:
    """One choice, whole."""

    text: str = ""
    tokens: list[Chosen] = field(default_factory=list)
    reason: Reason = "stop"
    is_first: bool = True
    """Whether nothing of the choice was sent before."""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        if piece.reason is not None:
            self.reason = piece.reason


@dataclass(frozen=True)
class Admitted:
    """A request that holds its slots."""

    model: LanguageModelHere
    prompts: Sequence[Prompt]
    release: Callable[[], None]

    async def answers(self) -> list[Answer]:
        """All choices, whole, in order."""

        async def one(prompt: Prompt) -> Answer:
            answer = Answer()
            async with aclosing(self.model.engine.submit(prompt)) as pieces:
                async for piece in pieces:
                    answer.add(piece)
            return answer

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in self.prompts]
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        finally:
            self.release()
        return [task.result() for task in tasks]

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all choices as they come, with the number of the choice; closing the generator ends all
        of them."""
        found: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

        async def one(index: int, prompt: Prompt) -> None:
            try:
                async with aclosing(self.model.engine.submit(prompt)) as pieces:
                    async for piece in pieces:
                        found.put_nowait((index, piece))
                found.put_nowait(None)
            except Exception as error:
                found.put_nowait(error)

        tasks = [asyncio.create_task(one(index, prompt)) for index, prompt in enumerate(self.prompts)]
        try:
            left = len(tasks)
            while left:
                each = await found.get()
                if isinstance(each, Exception):
                    raise each
                if each is None:
                    left -= 1
                else:
                    yield each
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.release()


class LanguageModels:
    """The models of a service, with the limits of each; on one event loop."""

    def __init__(self, models: Sequence[LanguageModelHere]) -> None:
        self.models = {model.name: model for model in models}
        self._admissions = {
            model.name: Admissions(model.settings.service, model.settings.callers, monotonic)
            for model in models
        }

    def model(self, name: str) -> LanguageModelHere:
        """A model by its name.

        Raises:
            RequestError: there is none (404).
        """
        if name not in self.models:
            known = ", ".join(map(repr, self.models))
            raise RequestError(
                f"there is no model {name!r}; here are {known}", 404, param="model", code="model_not_found"
            )
        return self.models[name]

    def expires_at(self, http: Request, model: LanguageModelHere) -> float:
        """When an answer is of no use any more."""
        return self._info(http, model).expires_at

    def admit(self, http: Request, model: LanguageModelHere, prompts: Sequence[Prompt]) -> Admitted:
        """Take the slots of a request, all or none.

        Raises:
            RefusedError: too many requests of the caller, or of all.
            RequestError: more answers than are ever admitted together; or the engine has stopped (503).
        """
        admissions, info = self._admissions[model.name], self._info(http, model)
        most = admissions.most_at_once
        count = max(len(prompts), 1)  # an embedding is a request, too
        if most is not None and count > most:
            raise RequestError(f"{count} answers in one request; ask for 1 to {most}")
        self.check_room(model, len(prompts))
        releases = admissions.admit_all(info.caller, count)

        def release() -> None:
            for each in releases:
                each()

        return Admitted(model, prompts, release)

    def check_room(self, model: LanguageModelHere, count: int) -> None:
        """Check that so many answers could be begun, or wait.

        Raises:
            ServiceLimitError: too many wait.
            RequestError: the engine has stopped (503), or so many are never taken.
        """
        if count > (most := model.engine.most_at_once):
            raise RequestError(f"{count:,} answers in one request; {model.name} takes {most} at most")
        try:
            model.engine.check_room(count)
        except EngineStoppedError as error:
            raise RequestError(str(error), 503) from error

    def _info(self, http: Request, model: LanguageModelHere) -> RequestInfo:
        settings = model.settings
        return RequestInfo.of(http.headers, address_of(http), settings.callers.header, settings.timeout_s)


async def read_request(http: Request, kind: type[Wanted]) -> Wanted:
    """The body of a request.

    Raises:
        RequestError: it is no JSON, or says what is not known or not of its type; names the first.
    """
    body = json_object(await unpacked_body(http))
    return checked(body, kind)


def checked(body: Mapping[str, Any], kind: type[Wanted]) -> Wanted:
    """As `read_request`."""
    try:
        # What clients send for "as ever".
        return kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        problems = error.errors()
        known = [field.alias or name for name, field in kind.model_fields.items()]
        raise RequestError(
            explain(problems, known), param=str(problems[0]["loc"][0]) if problems[0]["loc"] else None
        ) from error


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

    release: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
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
            answer = error_response(http.url.path, 500, f"the answer could not be ended: {error}")
            yield f"data: {bytes(answer.body).decode()}\n\n"
            return
        if last is not None:
            yield f"data: {last}\n\n"

    response = _Releasing(
        lines(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
    response.release = admitted.release
    return response

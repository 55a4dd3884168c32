"""Methods of the Open Inference Protocol over gRPC: bytes in, bytes out.

    call ─► token? ─► its model ─► room? ─► message ─► `OpenInference`, as over HTTP ─► answer
             └ UNAUTHENTICATED      └ UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED

What is behind `OpenInference` is shared with HTTP: limits, deadlines, steps under load, the batcher, the log.
A call that is cancelled, or whose deadline is over, gives back its places: what waits is not computed.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI

from rayrec.platform.errors import UnavailableError
from rayrec.serve.admission.limits import CallerLimitError, RefusedError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batching import DeadlineError, TooManyWaitingError
from rayrec.serve.engine.understanding import RefusedRequestError
from rayrec.serve.events.request_log import REQUEST_ID, request_id_of
from rayrec.serve.protocols.open_inference import Asked, OpenInference
from rayrec.serve.rpc.calls import Call, Reply, is_loopback
from rayrec.serve.rpc.messages import SERVICE, message_class
from rayrec.serve.rpc.tensors import read_request, written_answer
from rayrec.serve.web.api import Answering
from rayrec.serve.web.bearer_token import NO_TOKEN, has_token
from rayrec.serve.web.models import applications_of
from rayrec.serve.wire.deadlines import HeaderError
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.request_body import LARGE_BYTES, MAX_BODY_BYTES, beside_the_loop

logger = logging.getLogger(__name__)

OPEN_METHODS = ("ServerLive", "ServerReady")
"""Probes, which need no token."""
_OF_A_MODEL = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer")
"""Whose messages name one."""
METHODS = (*OPEN_METHODS, "ServerMetadata", "RepositoryIndex", *_OF_A_MODEL)

Method = Callable[[bytes, Call, Answering], Awaitable[Reply]]
Describe = Callable[[Any, OpenInference], dict[str, Any]]
"""Fields of the response by the request."""


class RpcService:
    """Answers calls of one service; on the event loop of its admission controls."""

    def __init__(
        self, models: Sequence[Answering], token_digest: str | None = None, only_here: bool = False
    ) -> None:
        """
        Args:
            models: the first one answers what is asked of the service.
            token_digest: SHA-256 of the token that callers have to send; None: none.
            only_here: refuse calls from other machines, wherever the server listens.
        """
        self._first = models[0]
        self._models = {each.inference.name: each for each in models}
        self._token_digest, self._only_here = token_digest, only_here
        described: dict[str, Describe] = {
            "ServerLive": lambda asked, inference: {"live": True},
            "ServerReady": lambda asked, inference: {"ready": True},
            "ServerMetadata": lambda asked, inference: inference.server(),
            "RepositoryIndex": lambda asked, inference: {"models": inference.index()},
            "ModelReady": _ready,
            "ModelMetadata": _metadata,
            "ModelConfig": _config,
            "ModelStatistics": _statistics,
        }
        self._methods: dict[str, Method] = {
            name: partial(_described, name, describe) for name, describe in described.items()
        }
        self._methods["ModelInfer"] = _infer
        assert tuple(self._methods) == METHODS, "each is declared"

    @classmethod
    def of(cls, api: FastAPI, config: ServeConfig) -> RpcService:
        """Of what answers over HTTP.

        Args:
            api: of `build_api`, or of `together`.
        """
        models = [each.state.answering for each in applications_of(api)]
        return cls(models, config.token_sha256, config.is_loopback)

    async def answer(self, method: str, content: bytes, call: Call) -> Reply:
        """What a call gets, errors included.

        Args:
            method: one of `METHODS`.
            content: the serialized message.
        """
        began, status, model = time.perf_counter(), 499, self._first
        try:
            reply = self._refusal(method, content, call)
            if reply is None:
                model = self._asked(method, content)
                reply = await self._answered(method, content, call, model)
            status = reply.status
            return reply
        finally:  # also of one that is cancelled
            seconds = time.perf_counter() - began
            for meter in model.meters:
                meter.request(f"/{SERVICE}/{method}", status, seconds)

    def _refusal(self, method: str, content: bytes, call: Call) -> Reply | None:
        """What is refused whatever it asks; None: this is not."""
        if self._only_here and not is_loopback(call.address):
            return Reply.failed(403, "this service answers its own machine alone")
        digest = None if method in OPEN_METHODS else self._token_digest
        if digest is not None and not has_token(call.headers.get("authorization", ""), digest):
            return Reply.failed(401, NO_TOKEN)
        if len(content) > MAX_BODY_BYTES:
            return Reply.failed(413, f"the message is larger than {MAX_BODY_BYTES} bytes; send less")
        return None

    def _asked(self, method: str, content: bytes) -> Answering:
        """The model that a message names; the first, which says what is wrong, where there is none."""
        if len(self._models) == 1 or method not in _OF_A_MODEL:
            return self._first
        try:
            # All of them have its name in the same field, and this one knows little else to look at.
            name = _parsed("ModelReadyRequest", content).name
        except RequestError:
            return self._first
        return self._models.get(name, self._first)

    async def _answered(self, method: str, content: bytes, call: Call, model: Answering) -> Reply:
        try:
            return await self._methods[method](content, call, model)
        except RequestError as error:
            return Reply.failed(error.status, str(error), 1.0 if error.status == 503 else None)
        except (HeaderError, RefusedRequestError) as error:
            return Reply.failed(400, str(error))
        except CallerLimitError as error:
            return Reply.failed(429, str(error), error.wait_s)
        except RefusedError as error:
            return Reply.failed(503, str(error), error.wait_s)
        except TooManyWaitingError as error:
            return Reply.failed(503, f"{error}; try again in a second", 1.0)
        except DeadlineError as error:
            return Reply.failed(504, f"{error}; try again in a second")
        except UnavailableError as error:
            return Reply.failed(503, f"a service that the row needs does not answer: {error}", 1.0)
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            logger.exception("%s failed, error %s", method, error_id)
            return Reply.failed(500, f"something failed in the service; its log says what under {error_id}")


async def _described(method: str, describe: Describe, content: bytes, call: Call, model: Answering) -> Reply:
    """Answer what is not computed."""
    asked = _parsed(f"{method}Request", content)
    fields = describe(asked, model.inference)
    return Reply(message_class(f"{method}Response")(**fields).SerializeToString())


def _ready(asked: Any, inference: OpenInference) -> dict[str, Any]:
    try:
        inference.asked(asked.name, asked.version or None)
    except RequestError:
        return {"ready": False}
    return {"ready": True}


def _metadata(asked: Any, inference: OpenInference) -> dict[str, Any]:
    return inference.metadata(asked.name, asked.version or None)


def _config(asked: Any, inference: OpenInference) -> dict[str, Any]:
    return {"config": inference.config(asked.name, asked.version or None)}


def _statistics(asked: Any, inference: OpenInference) -> dict[str, Any]:
    return inference.statistics(asked.name, asked.version or None)


async def _infer(content: bytes, call: Call, model: Answering) -> Reply:
    inference, admission = model.inference, model.admission
    info = admission.read_headers(call.headers, call.address)
    if call.left_s is not None:
        info.expires_at = min(info.expires_at, info.began_at + max(call.left_s, 0.0))
    admission.check_room(info)
    try:

        def read() -> tuple[Any, Asked]:
            message, asked = read_request(content)
            return message, inference.understood(asked)

        message, asked = await beside_the_loop(len(content) > LARGE_BYTES, read)
        named = inference.named(message.model_name, message.model_version or None)
        request_id = request_id_of(call.headers.get(REQUEST_ID))
        answered = await inference.answered(named, asked, info, request_id)
    finally:
        admission.here(info)

    def written() -> bytes:
        return written_answer(message, answered, asked.is_binary).SerializeToString()

    content = await beside_the_loop(answered.is_large, written)
    return Reply(content, trailing=((REQUEST_ID.lower(), request_id),))


def _parsed(name: str, content: bytes) -> Any:
    try:
        return message_class(name).FromString(content)
    except Exception as error:  # of protobuf's, which has one for each of its implementations
        raise RequestError(f"the message is no {name}") from error

"""Chat completions, completions, models and embeddings, as OpenAI's API has them.

Source: the reference of OpenAI's API, platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from rayrec.serve.language.answering import LanguageModels, events
from rayrec.serve.language.served import Kind
from rayrec.serve.wire.request_body import json_object, unpacked_body


def openai_router(models: LanguageModels) -> APIRouter:
    """Routes below `/v1`."""
    router = APIRouter(prefix="/v1", tags=["Language models"])
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "rayrec"}

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """All models."""
        return {"object": "list", "data": [described(name) for name in models.names]}

    @router.get("/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        """A model."""
        return described(models.check_name(name))

    @router.post("/chat/completions", response_model=None)
    async def chat(http: Request) -> Response:
        """The next message of a conversation, at once or as it is written."""
        return await answered(http, "chat")

    @router.post("/completions", response_model=None)
    async def completions(http: Request) -> Response:
        """How texts go on."""
        return await answered(http, "text")

    @router.post("/embeddings", response_model=None)
    async def embeddings(http: Request) -> Response:
        """A vector for each text."""
        return await answered(http, "embedding")

    async def answered(http: Request, kind: Kind) -> Response:
        admitted = models.admit(http, kind, json_object(await unpacked_body(http)))
        if admitted.call.is_stream:
            return events(http, admitted, await admitted.values(http), "[DONE]")
        return JSONResponse(await admitted.whole(http), headers=dict(admitted.headers))

    return router

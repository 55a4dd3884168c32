"""`/v1/lists`: named lists of items that filters of requests refer to."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from rayrec.platform.errors import InputError
from rayrec.serve.engine.lists import ItemLists
from rayrec.serve.wire.errors import RequestError, explain
from rayrec.serve.wire.request_body import json_object, unpacked_body
from rayrec.serve.wire.schemas import Asked, Key


class ItemList(Asked):
    """Items of a list."""

    items: list[Key] = Field(fail_fast=True)


class ListAnswer(BaseModel):
    """A list that is kept."""

    name: str
    num_items: int
    version: str
    """Another one whenever the items change."""


_BODY = {"required": True, "content": {"application/json": {"schema": ItemList.model_json_schema()}}}


def lists_router(lists: ItemLists | None) -> APIRouter:
    """Make the routes of lists.

    Args:
        lists: None: the service keeps none, and says so.
    """
    router = APIRouter(prefix="/v1/lists", tags=["Lists"])

    def kept() -> ItemLists:
        if lists is None:
            raise RequestError(
                "several replicas have no lists in common; start the service with --lists FOLDER", 404
            )
        return lists

    def no_list(name: str) -> RequestError:
        return RequestError(f"there is no list {name!r}; PUT makes it", 404)

    @router.get("")
    async def names() -> dict[str, list[str]]:
        """Names of all lists."""
        return {"lists": await asyncio.to_thread(kept().names)}

    @router.get("/{name}")
    async def read(name: str) -> dict[str, list[str]]:
        """Items of a list."""
        try:
            found = await asyncio.to_thread(kept().get, name)
        except InputError as error:  # its file is damaged, which is no mistake of who asks
            raise RequestError(str(error), 500) from error
        if found is None:
            raise no_list(name)
        return {"items": sorted(found.keys)}

    @router.put("/{name}", openapi_extra={"requestBody": _BODY})
    async def put(name: str, http: Request) -> ListAnswer:
        """Replace a list, or begin it: the next request goes by it, those of other replicas in a second."""
        body = await unpacked_body(http)

        def replaced() -> ListAnswer:
            try:
                wanted = ItemList.model_validate(json_object(body))
                new = kept().put(name, [str(key) for key in wanted.items])
            except ValidationError as error:
                raise RequestError(explain(error.errors(), ItemList.model_fields), 422) from error
            except InputError as error:
                raise RequestError(str(error), 422) from error
            return ListAnswer(name=name, num_items=len(new.keys), version=new.version)

        return await asyncio.to_thread(replaced)

    @router.delete("/{name}")
    async def delete(name: str) -> dict[str, bool]:
        """Forget a list; requests that name it are refused from now on."""
        if not await asyncio.to_thread(kept().delete, name):
            raise no_list(name)
        return {"deleted": True}

    return router

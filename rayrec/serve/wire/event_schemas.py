"""Events and what is answered to them, as the OpenAPI page describes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, StrictStr

from rayrec.serve.wire.schemas import LATEST_S, Asked, Key, _Schema


def _is_seconds(value: float) -> float:
    if value > LATEST_S:
        raise ValueError(
            f"expected seconds since 1970, and {value} of them end after the year 5000; give seconds, not "
            "milliseconds"
        )
    return value


class Event(Asked):
    """Something that a user did with an item."""

    user_id: Key
    item_id: Key
    timestamp: (
        Annotated[StrictInt | StrictFloat, Field(ge=0, allow_inf_nan=False), AfterValidator(_is_seconds)]
        | None
    ) = None
    """UNIX seconds; now, if not given. An event is the same again if user, item, time and behavior are: give
    the time, so that a message that is sent twice counts once."""
    behavior: StrictStr | None = None
    """What the user did, as the log of the data has it."""


class EventsAnswer(_Schema):
    """What became of events."""

    taken: int
    """Events that the next recommendation knows and training will read, or did already."""
    repeated: int
    """Of these, such as were known before."""
    unknown_items: int
    """Of these, events of items that are not in the catalog: they are kept for training and a later
    catalog, and no recommendation knows them."""

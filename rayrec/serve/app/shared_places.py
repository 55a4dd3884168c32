"""What models of one service write to in common: event stores in Redis, and lists of items.

Both name items by ids or keys alone. So models of the same items may share them, as one that ranks beside one
that does not, and models of other items may not: an id of one would count as the other's. A folder with an
event store is of one model anyway, see `ServeConfig`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import numpy as np

from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.serve.config.serve import ServeConfig

_LEAST_SHARE = 0.01
"""Of the smaller catalog, which is in the other one, and of the titles of these, which are the same."""
_LEAST_TITLES = 20
"""Of fewer titles nothing is said."""


class SharedPlaces:
    """Places of the models that were seen so far."""

    def __init__(self) -> None:
        self._users: dict[str, list[tuple[str, Dataset]]] = {}

    def add(self, config: ServeConfig, dataset: Dataset) -> None:
        """Take in a model.

        Args:
            dataset: whose items it answers with.

        Raises:
            InputError: one before it has a place in common with it, and other items.
        """
        for place, what in _places_of(config):
            users = self._users.setdefault(place, [])
            for name, other in users:
                if (why := _why_others(dataset, other)) is not None:
                    own = f"{place.partition('#')[0]}{'#' if '#' in place else '/'}{config.name}"
                    raise InputError(
                        f"{what}: {place} is that of the model {name!r}, too, whose items are others "
                        f"({why}), and an id of one would count as the other's; give each a place of its "
                        f"own, such as {own}"
                    )
            users.append((config.name, dataset))


def _places_of(config: ServeConfig) -> Iterator[tuple[str, str]]:
    """(place, the same however it is written; setting) of what may be shared."""
    if config.events is not None and config.events.store is not None and "://" in config.events.store:
        yield _place_of_url(config.events.store), "events.store"
    if config.lists is not None:
        yield os.path.realpath(config.lists), "lists"


def _place_of_url(url: str) -> str:
    """Without user and password. `redis://host#a` and `redis://host:6379/0#a` are one."""
    parts = urlsplit(url)
    address = re.fullmatch(r"(\[.*\]|[^:]*):?(.*)", parts.netloc.rpartition("@")[2].lower())
    assert address is not None, "both parts may be empty"
    host, port = address.groups()
    # As the client: what the path says counts where the options do not.
    database = parse_qs(parts.query).get("db", [parts.path.strip("/") or "0"])[0]
    return f"{parts.scheme}://{host or 'localhost'}:{port or 6379}/{database}#{parts.fragment or 'rayrec'}"


def _why_others(mine: Dataset, other: Dataset) -> str | None:
    """Why items of two catalogs are not the same; None: they are, or it cannot be told."""
    if mine.manifest.id_kinds != other.manifest.id_kinds:
        return f"ids are {mine.manifest.id_kinds} and {other.manifest.id_kinds}"
    shared_S, places_S, other_S = np.intersect1d(mine.items.ids_I, other.items.ids_I, return_indices=True)
    fewest = min(len(mine.items.ids_I), len(other.items.ids_I))
    if len(shared_S) < _LEAST_SHARE * fewest:
        return f"{len(shared_S):,} of {fewest:,} are in both"
    titles, others = (
        each.items.titles.take(at_S).to_pylist() for each, at_S in ((mine, places_S), (other, other_S))
    )
    are_same = [title == also for title, also in zip(titles, others, strict=True) if title and also]
    if len(are_same) >= _LEAST_TITLES and sum(are_same) < _LEAST_SHARE * len(are_same):
        return f"{sum(are_same):,} of {len(are_same):,} have the same title in both"
    return None

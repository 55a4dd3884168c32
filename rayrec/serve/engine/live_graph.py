"""The graph of users and items of a process that answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import TemporalGraph
from rayrec.samples.stores.manifest import PER_SECOND
from rayrec.serve.config.neighbors import NeighborsConfig


class LiveGraph:
    """A saved graph, for answers of now."""

    def __init__(self, config: NeighborsConfig, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: UNIX seconds.

        Raises:
            InputError: there is no graph, it is damaged, or it is all of the future.
        """
        self._config, self._clock = config, clock
        self.graph = TemporalGraph.open(config.graph)
        segments = self.graph.state.segments
        if segments and min(one.first_time for one in segments) > self.now():
            raise InputError(
                f"{config.graph}: all events of this graph are in the future by this machine's clock, in "
                f"{self.graph.config.time_unit}; make it of a log whose times are in the unit that it says"
            )

    def now(self) -> int:
        """In the graph's unit: events from here on do not count yet."""
        seconds = self._clock() + self._config.max_ahead_s
        return round(seconds * PER_SECOND[self.graph.config.time_unit])

    def check_data(self, dataset: Dataset) -> None:
        """Refuse a graph whose users and items are not those of a data set.

        Raises:
            InputError: its ids are of another kind, or the data set knows none of its items.
        """
        config, state = self.graph.config, self.graph.state
        kinds = dataset.manifest.id_kinds
        another = (
            f"{self._config.graph}: this graph is of another log than the data set "
            f"{dataset.manifest.name!r}: "
        )
        if config.id_kinds != kinds:
            raise InputError(f"{another}its ids are {config.id_kinds}, those of the data set {kinds}")
        if state.segments and not any(
            (dataset.item_positions(np.asarray(one.items.nodes_V)) >= 0).any() for one in state.segments
        ):
            raise InputError(f"{another}the data set has none of its items; make a graph of the same log")

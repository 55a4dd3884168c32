"""The graph of users and items of a process that answers, and a thread that follows its store.

every `poll_s`: feed of the store ─► append ─► the next answer knows it
                  ├ fell behind: the store is read again, while requests are answered with what is there
                  └ does not answer: counted, said once; the graph stays as it is
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import TemporalGraph, check_data
from rayrec.samples.graph.following import catch_up, check_store
from rayrec.samples.stores import open_store
from rayrec.samples.stores.manifest import PER_SECOND
from rayrec.serve.config.neighbors import NeighborsConfig

logger = logging.getLogger(__name__)

FORGET_EVERY_S = 3600.0
"""Edges that are older than the graph keeps are looked for so often: that looks at all of them."""


class LiveGraph:
    """A saved graph, for answers of now."""

    def __init__(
        self,
        config: NeighborsConfig,
        store: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            store: event store to follow; None: the graph stays as it is.
            clock: of waits, and of how far the graph is behind.
            wall_clock: UNIX seconds, as events have them.

        Raises:
            InputError: there is no graph, it is damaged, or it is all of the future; or the store has
                one side, or is of another log.
            StoreUnavailableError: the store does not answer.
        """
        self._config, self._clock, self._wall_clock = config, clock, wall_clock
        self.graph = TemporalGraph.open(config.graph)
        segments = self.graph.state.segments
        # Medians: an event at time 0 must not hide that the others are in another unit.
        if segments and min(float(np.median(one.users.times_E)) for one in segments) > self.now():
            raise InputError(
                f"{config.graph}: the events of this graph are in the future by this machine's clock, in "
                f"{self.graph.config.time_unit}; make it of a log whose times are in the unit that it says"
            )
        self._num_errors = self._num_rebuilt = self._num_added = 0
        self._last_error: str | None = None
        self._caught_up_at = self._forgot_at = clock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._store = None if store is None else open_store(store, config.retry)
        if self._store is not None:
            try:
                check_store(self.graph, self._store, config.graph)
                if self._store.feed_position() is None:
                    raise InputError(
                        f"{self._store.name}: this event store has one side, and neighbors follow one with "
                        "both; `rayrec data store SOURCE STORE --by item` builds the other one"
                    )
            except BaseException:
                self._store.close()
                raise

    def start(self) -> None:
        """Follow the store from now on, on a thread; what it has by now is there when this returns."""
        if self._store is None:
            logger.info("%s; it stays as it is: no event store is named", self._said())
            return
        self.look()
        logger.info("%s; it follows %s every %g s", self._said(), self._store.name, self._config.poll_s)

        def run() -> None:
            while not self._stopping.wait(self._config.poll_s):
                self.look()

        self._thread = threading.Thread(target=run, name="graph", daemon=True)
        self._thread.start()

    def _said(self) -> str:
        return f"neighbors of the graph {self._config.graph}, {self.graph.state.num_edges:,} edges"

    def look(self) -> None:
        """Take in what came; whatever goes wrong, the graph stays and is asked."""
        assert self._store is not None, "it follows one"
        began = self._clock()
        try:
            found = catch_up(self.graph, self._store)
            if began - self._forgot_at > FORGET_EVERY_S:
                self.graph.forget(self._wall_clock())
                self._forgot_at = began
        except Exception as error:  # of a store, or of what is in it
            self._num_errors += 1
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.error("neighbors stay as they are: %s", error)
            return
        self._last_error = None
        self._num_added += found.added
        self._num_rebuilt += not found.by_feed
        self._caught_up_at = began

    def stop(self) -> None:
        """Return when nothing is read any more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._store is not None:
            self._store.close()

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        found: dict[str, float] = {"graph_edges": self.graph.state.num_edges}
        if self._store is not None:
            found |= {
                "graph_lag_seconds": self._clock() - self._caught_up_at,
                "graph_events_total": self._num_added,
                "graph_errors_total": self._num_errors,
                "graph_rebuilt_total": self._num_rebuilt,
            }
        return found

    def now(self) -> int:
        """In the graph's unit: events from here on do not count yet."""
        seconds = self._wall_clock() + self._config.max_ahead_s
        return round(seconds * PER_SECOND[self.graph.config.time_unit])

    def check_data(self, dataset: Dataset) -> None:
        """Refuse a graph whose users and items are not those of a data set.

        Raises:
            InputError: its ids are of another kind, or it has hardly any of the data set's items.
        """
        check_data(self.graph, dataset, self._config.graph)

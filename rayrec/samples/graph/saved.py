"""A saved graph that goes on growing, as long-lived processes read it to ask about the past."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rayrec.platform.errors import InputError
from rayrec.samples.graph.temporal_graph import MANIFEST, GraphConfig, TemporalGraph

logger = logging.getLogger(__name__)


class SavedGraph:
    """The graph of a folder. It travels between processes; each maps the files for itself."""

    def __init__(self, folder: str) -> None:
        """
        Raises:
            InputError: there is none, it is damaged, or lacks edges of the past because of later ones.
        """
        self.folder = folder
        graph = TemporalGraph.open(folder)
        self._check_past(graph)
        self.config: GraphConfig = graph.config
        """As it was when this was made; kinds may have been added since."""
        self.floor: int = graph.state.floor
        """Likewise: older events it has forgotten."""
        self.past: str = graph.past
        """Likewise: another one after events that came late."""
        self.num_failures = 0
        """Times that it was saved since and could not be read."""
        self._has_said_late = False
        self._graph: TemporalGraph | None = None
        self._saved_at: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graph": None}

    def current(self) -> TemporalGraph:
        """Open it, again if it was saved since; only segments that are new are read.

        Where that cannot be read, what was read before is kept until it is saved again.

        Raises:
            InputError: it cannot be read the first time, or another graph took its place: of another log, or
                one that lacks edges of the past.
        """
        manifest = Path(self.folder) / MANIFEST
        saved_at = manifest.stat().st_mtime_ns if manifest.is_file() else None
        if self._graph is None or saved_at != self._saved_at:  # the graph has grown since
            try:
                graph = TemporalGraph.open(self.folder, self._graph)
            except InputError as error:
                if self._graph is None:
                    raise
                self.num_failures += 1
                logger.warning(
                    "%s; the graph that was read before is kept (failure %d)", error, self.num_failures
                )
                self._saved_at = saved_at
                return self._graph
            graph.check_log(self.config.log, f"the run that reads {self.folder}")
            self._check_past(graph)
            if graph.past != self.past and not self._has_said_late:
                self._has_said_late = True
                logger.warning(
                    "%s: events came late to this graph: from now on the same row may have other neighbors "
                    "than before; for a run that can be repeated, leave the graph as it is",
                    self.folder,
                )
            self._graph, self._saved_at = graph, saved_at
        return self._graph

    def _check_past(self, graph: TemporalGraph) -> None:
        most = graph.config.max_edges_per_node
        if most is not None:
            raise InputError(
                f"{self.folder}: this graph keeps the newest {most} edges of a node, so that what a row of "
                "the past finds missing tells what came after it: make one in a new folder without "
                "--max-per-node (bounded ones are for answers of now: `rayrec serve --neighbors`)"
            )

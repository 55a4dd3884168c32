"""A saved graph that goes on growing, as long-lived processes read it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rayrec.samples.graph.temporal_graph import MANIFEST, GraphConfig, TemporalGraph


class SavedGraph:
    """The graph of a folder. It travels between processes; each maps the files for itself."""

    def __init__(self, folder: str) -> None:
        """
        Raises:
            InputError: there is none, or it is damaged.
        """
        self.folder = folder
        graph = TemporalGraph.open(folder)
        self.config: GraphConfig = graph.config
        """As it was when this was made; kinds may have been added since."""
        self.floor: int = graph.state.floor
        """Likewise: older events it has forgotten."""
        self.version: str = hashlib.sha256((Path(folder) / MANIFEST).read_bytes()).hexdigest()
        """Likewise: another one for other edges."""
        self._graph: TemporalGraph | None = None
        self._saved_at: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graph": None}

    def current(self) -> TemporalGraph:
        """Open it, again if it was saved since.

        Raises:
            InputError: it is not there any more, is damaged, or is of another log now.
        """
        manifest = Path(self.folder) / MANIFEST
        saved_at = manifest.stat().st_mtime_ns if manifest.is_file() else None
        if self._graph is None or saved_at != self._saved_at:  # the graph has grown since
            graph = TemporalGraph.open(self.folder)
            graph.check_log(self.config.log, f"the run that reads {self.folder}")
            self._graph, self._saved_at = graph, saved_at
        return self._graph

"""`rayrec data graph`: a saved graph of an event store or a data set, made or brought up to date."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.dataset_folder import kind_of
from rayrec.samples.graph.following import catch_up, check_store
from rayrec.samples.graph.sources import config_of_store, graph_of_dataset
from rayrec.samples.graph.temporal_graph import DAY_S, MANIFEST, TemporalGraph
from rayrec.samples.stores import open_store
from rayrec.samples.stores.manifest import PER_SECOND, TimeUnit


class GraphReport(NamedTuple):
    """What a graph holds."""

    edges: int
    added: int
    segments: int
    bytes_per_edge: float
    """Both directions."""
    first: str
    last: str


def build_graph(
    source: str,
    folder: Path,
    period_days: float | None = None,
    keep_days: float | None = None,
    max_per_node: int | None = None,
) -> GraphReport:
    """Make a graph of a source, or add to a saved one what the source has since.

    Args:
        source: an event store, whose side by user is read; or a data set, all of its events.
        period_days: length of a segment, of a graph that is made.
        keep_days: edges that are older than the newest by more are forgotten, from now on whenever the graph
            is brought up to date; None: as it was said before.
        max_per_node: newest edges of a user, and of an item, that are kept, of a graph that is made.

    Raises:
        InputError: there is no such source, the saved graph is of another log or has another bound, or a
            bound and a period are given together.
        StoreUnavailableError: the store did not answer.
    """
    graph, added = TemporalGraph.open(folder) if (folder / MANIFEST).is_file() else None, 0
    most = max_per_node if graph is None else graph.config.max_edges_per_node
    if max_per_node is not None and max_per_node != most:
        raise InputError(
            f"--max-per-node {max_per_node}: the graph in {folder} keeps {most or 'all'} edges of a node, "
            "which cannot be changed; make another one in a new folder"
        )
    if keep_days is not None and not 0 <= keep_days < math.inf:
        raise InputError(
            f"--keep-days {keep_days:g}: expected a number of days; leave it out to forget nothing"
        )
    if period_days is not None and most is not None:
        raise InputError(
            f"--period-days {period_days:g} and --max-per-node {most} do not go together: the newest edges "
            "of a node are those of all time, in one segment; leave --period-days out (--keep-days still "
            "forgets what is old)"
        )
    if "://" not in source and kind_of(Path(source)) is not None:
        dataset = Dataset.open(source)
        dataset.check_times()
        read = graph_of_dataset(dataset, "all", _period(graph, period_days, "s", folder), most)
        if graph is None:
            graph, added = read, read.state.num_edges
        else:
            graph.check_log(read.config.log, source)
            for segment in read.state.segments:
                # With a bound, an edge may be in one direction alone.
                for edges in (segment.users.edges(), segment.items.edges().reversed())[: 2 if most else 1]:
                    added += graph.append(*edges)
    else:
        store = open_store(source)
        try:
            period = _period(graph, period_days, store.manifest.time_unit, folder)
            if graph is None:
                graph = TemporalGraph(config_of_store(store.manifest, period, most))
            check_store(graph, store, str(folder))
            added = catch_up(graph, store).added
        finally:
            store.close()
    state = graph.state
    if not state.num_edges:
        raise InputError(f"{source}: there are no events to make a graph of")
    per_s = PER_SECOND[graph.config.time_unit]
    newest = max(segment.last_time for segment in state.segments)
    if keep_days is not None:
        graph.keep_days = keep_days
    graph.forget(time.time())
    state = graph.state
    graph.save(folder)
    oldest = max(min(segment.first_time for segment in state.segments), state.floor)
    first, last = (
        datetime.fromtimestamp(at / per_s, UTC).isoformat(" ", "seconds") for at in (oldest, newest)
    )
    per_edge = state.num_bytes / state.num_edges
    return GraphReport(state.num_edges, added, len(state.segments), per_edge, first, last)


def _period(graph: TemporalGraph | None, days: float | None, unit: TimeUnit, folder: Path) -> int | None:
    """Length of the segments of a graph that is made."""
    if days is not None and not 0 < days < math.inf:
        raise InputError(f"--period-days {days:g}: a segment has a length above 0, and an end")
    period = None if days is None else max(1, round(days * DAY_S * PER_SECOND[unit]))
    if graph is not None and days is not None and graph.config.period != period:
        made = graph.config.period
        said = "one segment" if made is None else f"segments of {made / DAY_S / PER_SECOND[unit]:g} days"
        raise InputError(
            f"--period-days {days:g}: the graph {folder} was made with {said}, which stays so; leave the "
            "option out, or make a new graph"
        )
    return period

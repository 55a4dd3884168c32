"""A graph of users and items in time: neighbors, walks and similar items, computed when they are asked for.

    graph = graph_of_store(open_store("stores/clicks"))     # or graph_of_dataset(Dataset.open("data/mine"))
    graph.append(users_E, items_E, times_E)                 # what happens meanwhile, in any order
    hops(graph, "user", users_B, times_B, (10, 10))         # two hops, strictly before each time
    co_visited(graph, Histories(items_N, offsets_B1, times_B), k=50)

`runs` keeps edges sorted, `temporal_graph` has them in both directions and in files, `views` is how kernels
see a node; `sampling` draws neighbors, `candidates` finds items near a history at a time, `similarity` makes
tables of similar items ahead, `sources` reads data sets and event stores. No graph library is used: those
that sample in time cannot be installed beside this torch, or let the future in (pyg #7794).
"""

from __future__ import annotations

from rayrec.samples.graph.candidates import Candidates, CoVisitation, Histories, Walks, co_visited, walked
from rayrec.samples.graph.sampling import Neighbors, Sampling, degrees, hops, neighbors
from rayrec.samples.graph.similarity import SimilarItems, SimilarityConfig, similar_items
from rayrec.samples.graph.sources import check_data, graph_of_dataset, graph_of_store
from rayrec.samples.graph.temporal_graph import GraphConfig, TemporalGraph
from rayrec.samples.graph.views import ANY_TIME

__all__ = [
    "ANY_TIME",
    "Candidates",
    "CoVisitation",
    "GraphConfig",
    "Histories",
    "Neighbors",
    "Sampling",
    "SimilarItems",
    "SimilarityConfig",
    "TemporalGraph",
    "Walks",
    "check_data",
    "co_visited",
    "degrees",
    "graph_of_dataset",
    "graph_of_store",
    "hops",
    "neighbors",
    "similar_items",
    "walked",
]

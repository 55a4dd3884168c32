"""Kinds of products: what each computes of a batch of users, and what it is told apart by.

Axes: B users, K items of each, T labels of a ranking model, F chunks, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import xxhash

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.summaries import Summaries
from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.pipelines.nearline.products import Product
from rayrec.platform.errors import InputError
from rayrec.platform.functions import import_function

Arrays = Mapping[str, np.ndarray]


class ProductKind(Protocol):
    """Computes one kind of product with one version."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str:
        """Of what computes it, see `Recommender.identity`."""
        ...

    @property
    def settings(self) -> int:
        """A hash of what else it is computed with, which readers do not know: a product of another one is
        made again."""
        ...

    def make(
        self, keys: Sequence[str], queries: Sequence[Query], before: Sequence[Product | None]
    ) -> list[Arrays | None]:
        """What is kept of each user; None: nothing can be said of one.

        Args:
            keys: of the users, as the source of the data writes them.
            before: what there is of other events of them.
        """
        ...


class SummariesKind:
    """Summaries of chunks of old events; those of chunks that stayed are not computed again."""

    name = "summaries"
    settings = 0

    def __init__(self, recommender: Recommender) -> None:
        """
        Raises:
            InputError: the model reads none.
        """
        if recommender.long_history is None:
            raise InputError(
                f"{recommender.run}: the model reads no summaries; leave out `summaries`, or train one with "
                "long_history"
            )
        self._recommender, self.identity = recommender, recommender.identity

    def make(
        self, keys: Sequence[str], queries: Sequence[Query], before: Sequence[Product | None]
    ) -> list[Arrays | None]:
        known = [
            query if product is None else replace(query, summaries=summaries_of(product))
            for query, product in zip(queries, before, strict=True)
        ]
        return [
            {"hashes": each.hashes_F, "vectors": each.vectors_FKD}
            for each in self._recommender.summarize(known)
        ]


def summaries_of(product: Product) -> Summaries:
    """What a model is given of a product of the kind `summaries`."""
    return Summaries(product.arrays["hashes"], product.arrays["vectors"])


class CandidatesKind:
    """The best items of the whole catalog, each with its log-probability; and what a ranking model thinks of
    them, where there is one."""

    name = "candidates"

    def __init__(
        self,
        recommender: Recommender,
        most: int,
        stage: RankingStage | None = None,
        search: int | None = None,
    ) -> None:
        """
        Args:
            most: items kept.
            search: see `NearlineConfig.search`.
        """
        self._recommender, self._stage = recommender, stage
        num_items = len(recommender.dataset.items)
        self._most, self._search = min(most, num_items), search
        self.identity = candidates_identity(recommender, stage)
        self.settings = _hash_of(self._most, min(search or num_items, num_items))

    def make(
        self, keys: Sequence[str], queries: Sequence[Query], before: Sequence[Product | None]
    ) -> list[Arrays | None]:
        ranked = self._recommender.rank_catalog(queries, self._most, self._search)
        made = _items_of(self._recommender, ranked)
        if self._stage is None:
            return list(made)
        opinion = self._stage.opinion(queries, ranked.items_BK, ranked.scores_BK)
        for row, arrays in enumerate(made):
            count = len(arrays["items"])
            arrays["objective"] = opinion.objective_BK[row, :count]
            arrays["labels"] = np.array(self._stage.scorer.labels)
            arrays["probabilities"] = opinion.probabilities_BKT[row, :count]
        return list(made)


def candidates_identity(recommender: Recommender, stage: RankingStage | None) -> str:
    """That of what computes candidates: of the version, and of the model that ranks them."""
    if stage is None:
        return recommender.identity
    settings = stage.config.model_dump_json(exclude={"candidates"})
    ranker = f"{stage.scorer.run} {stage.scorer.committed_step} {settings}"
    return xxhash.xxh3_128_hexdigest(f"{recommender.identity} {ranker}".encode())


class NeighborsKind:
    """Items that others met beside those of the history."""

    name = "neighbors"

    def __init__(self, recommender: Recommender, neighbors: NeighborRecommender, most: int) -> None:
        self._recommender, self._neighbors, self._most = recommender, neighbors, most
        self.identity = recommender.identity
        self.settings = _hash_of(most, neighbors.graph.fingerprint)

    def make(
        self, keys: Sequence[str], queries: Sequence[Query], before: Sequence[Product | None]
    ) -> list[Arrays | None]:
        near = self._neighbors.near(queries, self._most, exclude_seen=False)
        return list(_items_of(self._recommender, near))


class InstructionsKind:
    """Instructions by a function of the user's own."""

    name = "instructions"

    def __init__(self, recommender: Recommender, function: Callable[..., Any], name: str) -> None:
        """
        Args:
            name: by which a function is told from others: its code may call any other.
        """
        self._recommender, self._function = recommender, function
        self.identity = recommender.identity
        self.settings = _hash_of(name)

    def make(
        self, keys: Sequence[str], queries: Sequence[Query], before: Sequence[Product | None]
    ) -> list[Arrays | None]:
        """
        Raises:
            InputError: the function gives something else than a mapping for each user.
        """
        found = self._function(list(keys), list(queries))
        if not isinstance(found, Sequence) or len(found) != len(keys):
            raise InputError(
                f"instructions: the function gave {found!r:.100} for {len(keys)} users; expected a list with "
                "a mapping, or None, for each"
            )
        made = list[Arrays | None]()
        for names in found:
            parts = {} if names is None else self._recommender.instruction_of(names)
            arrays: Arrays = {str(part): np.array([code], np.int64) for part, code in parts.items()}
            made.append(arrays or None)
        return made


def _hash_of(*settings: str | int) -> int:
    return xxhash.xxh3_64_intdigest(repr(settings).encode())


def _items_of(recommender: Recommender, ranked: RankedItems) -> list[dict[str, np.ndarray]]:
    """Ids, since the catalog's positions are those of one version."""
    ids_I = recommender.dataset.items.ids_I
    return [
        {"items": ids_I[items_K[items_K >= 0]], "scores": scores_K[items_K >= 0].astype(np.float32)}
        for items_K, scores_K in zip(ranked.items_BK, ranked.scores_BK, strict=True)
    ]


def kinds_of(
    config: NearlineConfig,
    recommender: Recommender,
    stage: RankingStage | None = None,
    neighbors: NeighborRecommender | None = None,
) -> list[ProductKind]:
    """The kinds that settings name, in the order in which they are computed: summaries first, which the
    others read.

    Raises:
        InputError: one lacks what it is computed with.
    """
    kinds = list[ProductKind]()
    if "summaries" in config.products:
        kinds.append(SummariesKind(recommender))
    if "candidates" in config.products:
        kinds.append(CandidatesKind(recommender, config.candidates, stage, config.search))
    if "neighbors" in config.products:
        if neighbors is None:
            raise InputError("neighbors: no graph is named; give one that `rayrec data graph` wrote")
        kinds.append(NeighborsKind(recommender, neighbors, config.candidates))
    if "instructions" in config.products:
        if config.function is None:
            raise InputError("instructions: no function makes them; name one as module:function")
        function = import_function("instructions: function", config.function)
        kinds.append(InstructionsKind(recommender, function, config.function))
    return kinds

"""Near-line products in answers: which of them fit a request, and what is counted of them.

Each kind is used where it fits the user's history of this moment, and else is as if it were not there:

    summaries       by chunk: those of the same events stand for them (`Query.summaries`)
    instructions    where the request has none, of this history or an earlier beginning of it
    candidates      more candidates for a ranking stage, of this history; and an answer for the step
    neighbors       `cached_answer`, candidates also of an earlier beginning of the history
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from rayrec.pipelines.inference.answers import Query, Ranking, Recommendation, Source, Wanted
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender, described
from rayrec.pipelines.nearline.kinds import candidates_identity, summaries_of
from rayrec.pipelines.nearline.product_store import ProductStore
from rayrec.pipelines.nearline.products import Product, ProductKey, stands_for, stands_for_earlier
from rayrec.platform.event_labels import Part
from rayrec.samples.stores import open_values
from rayrec.serve.config.nearline import NearlineReadConfig

logger = logging.getLogger(__name__)

AHEAD_S = 60.0
"""A product that was made later than this is of a clock that is wrong, and of no known age."""
RESULTS = ("hits", "missing", "stale", "old", "short")

Products = Mapping[str, Product]
"""Of one user, by kind."""


@dataclass(frozen=True)
class NearAnswer:
    """Items that were found before the request."""

    items: list[Recommendation]
    is_earlier: bool
    """They are of an earlier beginning of the history."""
    is_ranked: bool


class ProductReader:
    """Reads products for one version after the other; from any thread."""

    def __init__(
        self, config: NearlineReadConfig, store: ProductStore, clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            clock: UNIX seconds.
        """
        self.config, self.store, self._clock = config, store, clock
        self._counts = Counter[str]()
        self._ages: dict[str, float] = {}
        self._identity: str | None = None
        """Of the version that was read for last."""
        self._lock = threading.Lock()

    @classmethod
    def open(cls, config: NearlineReadConfig) -> ProductReader:
        """
        Raises:
            InputError: the store cannot be one.
        """
        values = open_values(config.store, config.retry, create=True)
        return cls(config, ProductStore(values, config.pause_s))

    def read(
        self, recommender: Recommender, stage: RankingStage | None, users: Sequence[int]
    ) -> dict[int, Products]:
        """Products of users, in one request; without those that cannot be used."""
        self._identity = recommender.identity
        keys = [
            ProductKey(
                kind,
                candidates_identity(recommender, stage) if kind == "candidates" else recommender.identity,
                user,
            )
            for user in users
            for kind in self.config.products
        ]
        found: dict[int, dict[str, Product]] = {user: {} for user in users}
        for key, product in zip(keys, self.store.get_many(keys), strict=True):
            if product is not None:
                found[key.user][key.kind] = product
        return dict(found)

    def applied(
        self, recommender: Recommender, query: Query, products: Products, has_instruction: bool
    ) -> Query:
        """The query with what was computed of its user.

        Args:
            has_instruction: the request has one, which counts.
        """
        try:
            if "summaries" in self.config.products and recommender.long_history is not None:
                summaries = products.get("summaries")
                if summaries is not None:
                    query = replace(query, summaries=summaries_of(summaries))
                # Events that came since leave the chunks before them what they are.
                fits = summaries is not None and stands_for_earlier(recommender, summaries, query)
                self._note("summaries", summaries, "hits" if fits else "stale")
            if "instructions" in self.config.products and not has_instruction:
                given = products.get("instructions")
                result = self._fit(recommender, given, query, has_age=True)
                self._note("instructions", given, result)
                if given is not None and result == "hits":
                    parts = {cast("Part", name): int(codes[0]) for name, codes in given.arrays.items()}
                    query = replace(query, instruction=parts)
        except (KeyError, IndexError, ValueError) as error:  # of a record that its writer got wrong
            logger.warning("near-line products of a user are left out: %r", error)
        return query

    def candidates(self, recommender: Recommender, query: Query, products: Products) -> list[Recommendation]:
        """What a ranking stage may rank besides what it is given, best first."""
        found = list[Recommendation]()
        for kind in ("candidates", "neighbors"):
            product = products.get(kind)
            if kind not in self.config.products:
                continue
            result = self._fit(recommender, product, query, has_age=kind == "neighbors", may_be_earlier=False)
            self._note(kind, product, result)
            if product is not None and result == "hits":
                found += self._items(recommender, kind, product, query, Wanted(len(product.arrays["items"])))
        return found

    def answer(
        self, recommender: Recommender, query: Query, wanted: Wanted, products: Products, ranks: bool
    ) -> NearAnswer | None:
        """What answers without the model; None where there is nothing, or too little.

        Args:
            ranks: by what a ranking model said of the items, if it was asked.
        """
        for kind in ("candidates", "neighbors"):
            if kind not in self.config.products:
                continue
            product = products.get(kind)
            is_ranked = ranks and product is not None and "objective" in product.arrays
            result = self._fit(
                recommender,
                product,
                query,
                # A ranking model may read when it is asked, and a graph that moves.
                has_age=is_ranked or kind == "neighbors",
                may_be_earlier=kind == "candidates",
            )
            found = None
            if product is not None and result == "hits":
                items = self._items(recommender, kind, product, query, wanted, is_ranked)
                is_whole = len(product.arrays["items"]) >= len(recommender.dataset.items)
                if len(items) == wanted.k or (items and is_whole):
                    found = NearAnswer(items, not stands_for(recommender, product, query), is_ranked)
                else:
                    result = "short"
            self._note(kind, product, result)
            if found is not None:
                return found
        return None

    def _items(
        self,
        recommender: Recommender,
        kind: str,
        product: Product,
        query: Query,
        wanted: Wanted,
        is_ranked: bool = False,
    ) -> list[Recommendation]:
        """Those that may be shown now, whatever could be when they were found."""
        dataset, arrays = recommender.dataset, product.arrays
        items_K = np.asarray(arrays["items"], np.int64)
        order_K = np.argsort(-arrays["objective"], kind="stable") if is_ranked else np.arange(len(items_K))
        positions_K = dataset.item_positions(items_K)
        is_shown_K = positions_K >= 0
        if wanted.exclude_seen:
            is_shown_K &= ~np.isin(items_K, query.history_ids)
        if query.allowed_I is not None:
            is_shown_K &= query.allowed_I[positions_K]
        found = list[Recommendation]()
        for place in order_K[is_shown_K[order_K]][: wanted.k].tolist():
            source = "neighbors" if kind == "neighbors" else "model"
            item = described(
                dataset.items, int(positions_K[place]), float(arrays["scores"][place]), cast("Source", source)
            )
            if is_ranked:
                labels = [str(label) for label in arrays["labels"].tolist()]
                probabilities = dict(zip(labels, arrays["probabilities"][place].tolist(), strict=True))
                item = replace(item, ranking=Ranking(float(arrays["objective"][place]), probabilities))
            found.append(item)
        return found

    def _fit(
        self,
        recommender: Recommender,
        product: Product | None,
        query: Query,
        has_age: bool,
        may_be_earlier: bool = True,
    ) -> str:
        """
        Args:
            has_age: though it is of exactly this history, something else may be found now.
        """
        if product is None:
            return "missing"
        if not has_age and stands_for(recommender, product, query):
            return "hits"
        if not -AHEAD_S <= self._clock() - product.made_at <= self.config.max_age_s:
            return "old"
        fits = stands_for_earlier if may_be_earlier else stands_for
        return "hits" if fits(recommender, product, query) else "stale"

    def _note(self, kind: str, product: Product | None, result: str) -> None:
        with self._lock:
            self._counts[f"{kind}_{'missing' if product is None else result}"] += 1
            if product is not None and result == "hits":
                self._ages[kind] = max(self._clock() - product.made_at, 0.0)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        with self._lock:
            found: dict[str, float] = {
                f"nearline_{kind}_{result}_total": self._counts[f"{kind}_{result}"]
                for kind in self.config.products
                for result in RESULTS
            }
            found |= {f"nearline_{kind}_age_seconds": age for kind, age in self._ages.items()}
        found |= self._of_workers()
        unusable = self.store.unusable
        return found | {f"nearline_unusable_{reason}_total": count for reason, count in unusable.items()}

    def _of_workers(self) -> dict[str, float]:
        """What the workers of the version that answers have noted; nothing while the store is down."""
        if self._identity is None:
            return {}
        try:
            work, coverage = self.store.work(self._identity), self.store.coverage(self._identity)
        except Exception as error:  # of a store: metrics of everything else are shown all the same
            logger.debug("the work of near-line workers is not known: %s", error)
            return {}
        return {
            "nearline_coverage": coverage,
            "nearline_users_total": work.num_users,
            "nearline_user_seconds": work.seconds / work.num_users if work.num_users else 0.0,
            "nearline_waiting_users": work.num_waiting,
        }

    def is_covered(self, recommender: Recommender) -> bool:
        """Whether a version has the products that it is to have before it answers."""
        if self.config.min_coverage is None:
            return True
        try:
            return self.store.coverage(recommender.identity) >= self.config.min_coverage
        except Exception as error:  # of a store; the time to wait is bounded
            logger.warning("coverage of near-line products is not known: %s", error)
            return False

    def close(self) -> None:
        self.store.close()

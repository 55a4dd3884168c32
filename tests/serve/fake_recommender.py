"""Stands in for a trained model: three films, two users, and answers that can be told apart."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import uvicorn
from fastapi import FastAPI

from rayrec.pipelines.inference.answers import FULL_BUDGET, Answer, Budget, Query, Recommendation, Wanted
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.serve.config.admission import OPEN, AdmissionConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.web.api import build_api

ITEM_IDS = {"alien": 11, "7": 12, "brazil": 13}
USER_IDS = {"ann": 0, "42": 1}
HISTORIES = {"ann": [11, 12], "42": [13]}
TIMES = {"ann": [100, 200], "42": [300]}
WIDTH = 16
"""Of its ten beams, by which batches cost."""


class FakeDataset:
    manifest = SimpleNamespace(id_kinds={"user": "string", "item": "string"}, behaviors=())
    items = SimpleNamespace(
        keys=pa.chunked_array([list(ITEM_IDS)]),
        titles=pa.chunked_array([["Alien", None, "Brazil"]]),
        ids_I=np.array(list(ITEM_IDS.values()), dtype=np.int64),
    )
    users = pa.table({"user_key": list(USER_IDS), "user_id": list(USER_IDS.values())})
    sorted_user_keys = sorted(USER_IDS)

    def user_by_key(self, key: str) -> int | None:
        return USER_IDS.get(key)

    def history_of(self, key: str) -> np.ndarray | None:
        return np.array(HISTORIES[key], dtype=np.int64) if key in HISTORIES else None

    def item_positions(self, item_ids: np.ndarray) -> np.ndarray:
        known = list(ITEM_IDS.values())
        return np.array([known.index(item) if item in known else -1 for item in item_ids.tolist()])


class FakeRecommender:
    """Recommends "m0", "m1", ... by the model, "p0", "p1", ... by popularity; remembers what it was asked.

    With semantic IDs it recommends the films of the catalog in their order.
    """

    run = "films"
    committed_step = 99
    version = None
    max_length = 3
    """Events that it reads, the newest."""
    prefix_cache = None

    def __init__(self, codes: Sequence[Sequence[int]] | None = None) -> None:
        """
        Args:
            codes: of the three films; None: a model without semantic IDs.
        """
        self.dataset = FakeDataset()
        self.semantic_ids = None if codes is None else SimpleNamespace(codes_IL=np.array(codes))
        self.asked: list[tuple[list[int], int | None, int, bool]] = []
        """History ids, user id, k and exclude_seen of every question to the model."""
        self.instructions: list[dict[str, int]] = []
        """Of every question."""
        self.times: list[list[int] | None] = []
        """Of the histories of every question."""
        self.budgets: list[Budget] = []
        """Of every batch."""
        self.names_nothing = False
        """Whatever it reads."""
        self.leaves_nothing = False
        """Operations leave nothing of histories with the item 7."""

    def num_beams(self, k: int, budget: Budget = FULL_BUDGET) -> int:
        """Ten, or as many as items are asked for."""
        return max(10 if budget.max_beams is None else min(10, budget.max_beams), k)

    beams_of = Recommender.beams_of

    def answer(
        self, queries: Sequence[Query], k: int, exclude_seen: bool = True, budget: Budget = FULL_BUDGET
    ) -> list[Answer]:
        return self.answer_each(queries, [Wanted(k, exclude_seen, budget)] * len(queries))

    def answer_each(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        self.budgets.append(wanted[0].budget)
        return [
            self._answer(query, each.k, each.exclude_seen)
            for query, each in zip(queries, wanted, strict=True)
        ]

    def _answer(self, query: Query, k: int, exclude_seen: bool) -> Answer:
        self.asked.append((query.history_ids.tolist(), query.user_id, k, exclude_seen))
        self.instructions.append(dict(query.instruction))
        self.times.append(None if query.times is None else query.times.tolist())
        num_events = len(query.history_ids) + ("trigger_item" in query.instruction)
        num_read = min(num_events, self.max_length)
        if 12 in query.history_ids.tolist() and self.leaves_nothing:
            return Answer([], 0, len(query.history_ids))
        if self.names_nothing:
            return Answer([], num_read, num_events - num_read)
        names = [f"m{place}" for place in range(k)]
        if self.semantic_ids is not None:
            seen = set(query.history_ids.tolist()) if exclude_seen else set()
            names = [name for name, item_id in ITEM_IDS.items() if item_id not in seen][:k]
        items = [Recommendation(name, f"Film {place}", -0.5 - place) for place, name in enumerate(names)]
        return Answer(items, num_read, num_events - num_read)

    def instruction_of(self, names: Mapping[str, str | None]) -> dict[str, int]:
        """Behaviors are LIKE (0) and VIEW (1); a trigger has the place of its item."""
        codes = {}
        if (behavior := names["behavior"]) is not None:
            if behavior not in ("LIKE", "VIEW"):
                raise InputError(f"instruction: no event has {behavior!r}; those that occur: LIKE, VIEW")
            codes["behavior"] = ("LIKE", "VIEW").index(behavior)
        if (trigger := names["trigger_item"]) is not None:
            codes["trigger_item"] = list(ITEM_IDS).index(trigger)
        return codes

    def query_of_user(self, key: str) -> Query | None:
        if key not in HISTORIES:
            return None
        return Query(np.array(HISTORIES[key]), USER_IDS[key], np.array(TIMES[key]))

    def query_of(self, row: Mapping[str, Any]) -> Query:
        """Rows have a `user` and `clicks`, which is a text of numbers; click n is at time 10 n."""
        if set(row) - {"user", "clicks"}:
            raise InputError("there is no field " + repr(min(set(row) - {"user", "clicks"})))
        if row.get("user") == 999:
            raise UnavailableError("redis://clicks", 2, "refused")
        clicks = np.array(str(row.get("clicks", "")).split(), dtype=np.int64)
        return Query(clicks, row.get("user"), 10 * np.arange(len(clicks)))

    def popular(self, k: int, exclude_ids: np.ndarray | None = None) -> list[Recommendation]:
        self.left_out = exclude_ids
        return [Recommendation(f"p{place}", None, 9.0 - place, source="popular") for place in range(k)]


@contextmanager
def listening(api: FastAPI) -> Iterator[str]:
    """Host and port where the application answers, over HTTP as clients speak it."""
    server = uvicorn.Server(uvicorn.Config(api, log_level="warning", lifespan="off"))
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [there]}, daemon=True)
        there.listen()  # from now on connections wait until the server takes them
        thread.start()
        try:
            yield f"127.0.0.1:{there.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=20)


def api_of(
    service: Any,
    max_waiting: int = 4,
    timeout_s: float = 10.0,
    max_batch: int = 1,
    admission: AdmissionConfig = OPEN,
    **more: Any,
) -> FastAPI:
    """The application, with a thread that computes.

    Args:
        more: of `build_api`.
    """
    costs = BatchCosts({1: 1e-6, max_batch: 1e-6}, WIDTH)
    batcher = Batcher(service.recommend_all, costs, max_waiting)
    return build_api(service, batcher, timeout_s, admission, **more)


class HeldService(RecommendationService):
    """Computes nothing before it is let."""

    def __init__(self, recommender=None):
        super().__init__(recommender or FakeRecommender(), max_k=50)
        self.begun, self.let = threading.Event(), threading.Event()
        self.asked = threading.Semaphore(0)
        self.batches = []

    def group_of(self, request):
        self.asked.release()
        return super().group_of(request)

    def wait_until_asked(self, address, times):
        for _ in range(times):
            assert self.asked.acquire(timeout=20)
        # The event loop answers this when it is done with them.
        assert httpx.get(f"http://{address}/v2/health/live", trust_env=False).json() == {"live": True}

    @staticmethod
    @contextmanager
    def asking(address, path, body):
        """A request that is under way inside the block; its answer is in the list afterwards."""
        answers = []

        def ask():
            answers.append(httpx.post(f"http://{address}{path}", json=body, timeout=20, trust_env=False))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield answers
        finally:
            thread.join(timeout=20)

    def recommend_all(self, requests):
        self.batches.append(len(requests))
        self.begun.set()
        assert self.let.wait(timeout=20)
        return super().recommend_all(requests)

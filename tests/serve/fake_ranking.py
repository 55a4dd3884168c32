"""A ranking stage without a model."""

from __future__ import annotations

from types import SimpleNamespace

from rayrec.pipelines.inference.recommender import FULL_BUDGET, Answer, Ranking, Recommendation
from rayrec.platform.errors import UnavailableError


class FakeStage:
    """Turns the recommender's first five items around."""

    scorer = SimpleNamespace(run="clicks", committed_step=9)
    config = SimpleNamespace(candidates=5)

    def __init__(self, recommender):
        self._recommender = recommender
        self.fails = False

    def num_beams(self, k, budget=FULL_BUDGET):
        return self._recommender.num_beams(max(k, 5), budget)

    def answer(self, queries, k, exclude_seen=True, budget=FULL_BUDGET):
        if self.fails:
            raise UnavailableError("redis://items", 2, "refused")
        (found,) = self._recommender.answer(queries, max(k, 5), exclude_seen, budget)
        ranked = [
            Recommendation(item.item_key, item.title, item.score, Ranking(place / 10, {"click": place / 10}))
            for place, item in enumerate(found.items)
        ]
        return [Answer(ranked[::-1][:k], found.num_read, found.num_unread)]

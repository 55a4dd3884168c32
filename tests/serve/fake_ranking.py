"""A ranking stage without a model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from rayrec.pipelines.inference.answers import FULL_BUDGET, Ranking
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

    def beams_of(self, wanted):
        return self._recommender.beams_of(replace(wanted, k=max(wanted.k, 5)))

    def answer_each(self, queries, wanted):
        if self.fails:
            raise UnavailableError("redis://items", 2, "refused")
        candidates = [replace(each, k=max(each.k, 5)) for each in wanted]
        return [
            replace(found, items=_turned(found.items)[: each.k])
            for found, each in zip(self._recommender.answer_each(queries, candidates), wanted, strict=True)
        ]


def _turned(items):
    return [
        replace(item, ranking=Ranking(place / 10, {"click": place / 10})) for place, item in enumerate(items)
    ][::-1]

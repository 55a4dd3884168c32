"""Is a seen item left out of the list, or out of the distribution?

    python -m benchmarks.filters RUN

RUN is the folder of a trained generative run. Its test users are ranked twice, with what they have seen left
out: once with every item's probability as it was without the filter, as serving does; once with a
distribution that is normalized anew under each prefix, over what may be given, as sampling does. The second
lifts items whose prefix is mostly seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rayrec.models.decoding.prefixes import ItemDistribution
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.pipelines.evaluation.evaluate_recommender import MODEL, evaluate_recommender
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.console import log, progress_bar

METRICS = ("recall@10", "recall@50", "ndcg@10")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.filters")
    parser.add_argument("run", type=Path)
    run = parser.parse_args(arguments).run
    distribution = GenerativeRecommender.distribution
    for renormalized in (False, True):

        def ranked(
            self: Any, *given: Any, renormalized: bool, as_is: bool = renormalized
        ) -> ItemDistribution:
            return distribution(self, *given, renormalized=as_is)

        with mock.patch.object(GenerativeRecommender, "distribution", ranked), progress_bar("rank") as done:
            found = evaluate_recommender(Recommender.load(run), "test", on_batch=done).results[MODEL]
        figures = ", ".join(f"{metric} {found[metric].value:.4f}" for metric in METRICS)
        log.print(f"{'normalized anew' if renormalized else 'left out of the list'}: {figures}")


if __name__ == "__main__":
    main()

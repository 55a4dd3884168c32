"""Which users are validated on, with stand-ins for the actors; they answer through Ray's store."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.cluster.watch import Watch
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training.stages import Stages
from rayrec.pipelines.training.validation import validate
from tests.helpers.data import small_dataset

pytestmark = pytest.mark.ray


def remote(answer: Any) -> Any:
    return SimpleNamespace(remote=lambda *arguments, **named: ray.put(answer(*arguments, **named)))


@pytest.mark.parametrize(("max_users", "num_users"), [(None, 40), (20, 20), (16, 16), (3, 3), (99, 40)])
def test_no_more_users_are_ranked_than_asked_for(ray_cluster, tmp_path, max_users, num_users):
    """Also where batches do not divide their number; every user's list here has no item."""
    dataset = small_dataset(tmp_path)
    settings = {"max_users": max_users, "batch_size": 8}
    config = RunConfig.parse(
        {"data": {"path": str(dataset.root)}, "model": {"name": "sasrec"}, "evaluation": settings}
    )
    ranked: list[int] = []

    def recommend(samples_ref: Any, k: int, exclude_seen: bool) -> RankedItems:
        rows = ray.get(samples_ref).user_ids_B
        ranked.extend(rows.tolist())
        return RankedItems(np.full((len(rows), k), -1), np.zeros((len(rows), k), dtype=np.float32))

    worker: Any = SimpleNamespace(ranking=remote(lambda samples: samples))
    trainer: Any = SimpleNamespace(begin_validation=remote(lambda: None), recommend=remote(recommend))
    monitor: Any = SimpleNamespace(accounts=remote(dict))
    assembly = assemble(config)
    watch = Watch(monitor, frozenset(), hang_timeout_s=60.0)
    stages = Stages(assembly.plan, [], [worker], [], [trainer], watch)
    figures = validate(stages, assembly.task.validation(assembly.features))

    assert figures["recall@10"].value == 0.0
    assert len(ranked) == num_users
    assert ranked == dataset.evaluation_rows("valid").user_ids_B[:num_users].tolist()

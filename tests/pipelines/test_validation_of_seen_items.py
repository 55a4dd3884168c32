"""Validation may keep items of the history, where users come back to them."""

from types import SimpleNamespace
from typing import Any

import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import assemble
from tests.helpers.data import small_dataset


@pytest.mark.parametrize(("settings", "excluded"), [({}, True), ({"exclude_seen": False}, False)])
def test_validation_keeps_seen_items_where_the_config_says_so(tmp_path, settings, excluded):
    dataset = small_dataset(tmp_path)
    config = RunConfig.parse(
        {"data": {"path": str(dataset.root)}, "model": {"name": "sasrec"}, "evaluation": settings}
    )
    assembly = assemble(config)
    validation = assembly.task.validation(assembly.features)
    asked: list[bool] = []
    worker: Any = SimpleNamespace(ranking=SimpleNamespace(remote=lambda batch: batch))
    trainer: Any = SimpleNamespace(
        recommend=SimpleNamespace(remote=lambda batch, k, exclude_seen: asked.append(exclude_seen))
    )

    for batch in validation.batches():
        validation.ask(worker, trainer, batch)

    assert set(asked) == {excluded}

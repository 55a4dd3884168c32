"""From a run's settings to its task."""

from __future__ import annotations

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.impressions import ImpressionTask
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.tasks.task import Task


def open_task(config: RunConfig, checksums: bool = True) -> Task:
    """Open what a run reads, and check that it fits the model.

    Raises:
        InputError: what the run reads is missing, damaged, or not what the model needs.
    """
    if config.model.kind == "impressions":
        return ImpressionTask.open(config, config.model, checksums)
    return NextItemTask.open(config, config.model, checksums)

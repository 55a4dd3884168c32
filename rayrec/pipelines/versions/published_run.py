"""A run whose snapshots are published as they come; what goes wrong with that does not end the run."""

from __future__ import annotations

import logging
from pathlib import Path

from rayrec.pipelines.config.run import PublishConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)


class PublishedRun:
    """What is published of a run. Not thread-safe."""

    def __init__(self, folder: RunFolder, config: PublishConfig) -> None:
        self._folder, self._config = folder, config
        self._publisher: Publisher | None = None
        self._store = VersionStore(config.to)

    def update(self, snapshot: Path) -> None:
        """Publish a snapshot that has just been written; an error is logged and counted in run.json.

        The next one brings what this one did not.
        """
        try:
            if self._publisher is None:
                self._publisher = Publisher(self._folder, self._store, self._config.dense_every_s)
            version = self._publisher.publish(read_snapshot(snapshot, checksums=False))
            self._store.keep_newest(self._config.keep)
        except (OSError, InputError) as error:
            failed = self._folder.state.get("failed_publications", 0) + 1
            logger.warning("%s was not published to %s: %s", snapshot.name, self._config.to, error)
            self._folder.update(failed_publications=failed)
            return
        self._folder.update(published_version=version.number)

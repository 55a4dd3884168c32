"""Which catalog the next version of a run gets: the one that somebody names, or the run's.

Or that of the version of it that serves, where that is a later one. So a run that publishes while it trains
takes no new items back, and goes on neither with the catalog of a canary that was returned nor with that of a
version that somebody went back from.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rayrec.pipelines.inference.loading import knowing_items_of
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import RunState
from rayrec.pipelines.tasks.assembly import Assembly, is_of
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.versions.catalog import CatalogBundles, put_catalog, with_catalog_of
from rayrec.pipelines.versions.manifest import ModelVersion
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedCatalog:
    """A catalog as it is published, and the run on it."""

    assembly: Assembly
    bundles: CatalogBundles

    @property
    def task(self) -> NextItemTask:
        task = self.assembly.task
        assert isinstance(task, NextItemTask), "versions are of recommenders"
        return task


class CatalogsOfRun:
    """Which catalog the versions of a run get. Not thread-safe."""

    def __init__(self, store: VersionStore, run: RunFolder, assembly: Assembly, is_told: bool) -> None:
        """
        Args:
            assembly: of the run, on its data set or on another one.
            is_told: somebody named the data set; else the catalog may be that of an earlier version.
        """
        self._store, self._run, self._assembly, self._is_told = store, run, assembly, is_told
        self._given: ServedCatalog | None = None
        self._later: ServedCatalog | None = None

    def next(self, state: RunState, where: str, newest: ModelVersion | None) -> ServedCatalog:
        """The catalog of the next version; its bundles are in the store.

        A data set that has grown where it lies, with its semantic IDs, goes before an earlier version's.

        Args:
            state: of the run.
            where: that is, for messages.
            newest: the version of the highest number.

        Raises:
            InputError: the run does not know the items, or the catalog to go on with is damaged.
        """
        was_put = self._given is None
        chosen = given = self._opened(state, where)
        if not self._is_told and is_of(state, given.task):
            before = self.version_that_serves(newest)
            if before is not None and CatalogBundles.of(before) != given.bundles:
                chosen = self._later_of(before, state, where) or given
            if before is not None and newest is not None:
                self._say_if_left(before, newest, chosen)
        is_there = was_put or (newest is not None and CatalogBundles.of(newest) == given.bundles)
        if chosen is given and not is_there:
            put_catalog(self._store, given.task)  # it may have been deleted with older versions
        return chosen

    def _say_if_left(self, serves: ModelVersion, newest: ModelVersion, chosen: ServedCatalog) -> None:
        is_one = newest.run == serves.run and newest.number > serves.number
        if is_one and CatalogBundles.of(newest) != chosen.bundles:
            logger.warning(
                "the catalog is that of version %d, which serves; version %d has another one, which is left",
                serves.number,
                newest.number,
            )

    def version_that_serves(self, newest: ModelVersion | None) -> ModelVersion | None:
        """Of this run: the version that serves or, where that is another run's, the last one before it."""
        pointer = self._store.current()
        if pointer is None:
            return None
        for number in reversed(self._store.numbers()):
            if number > pointer.version:
                continue
            try:
                is_newest = newest is not None and newest.number == number
                version = newest if is_newest else self._store.version(number)
            except InputError as error:
                logger.warning("no catalog is gone on with: %s", error)
                continue
            assert version is not None
            if version.run == self._run.name:
                return version
        return None

    def _opened(self, state: RunState, where: str) -> ServedCatalog:
        if self._given is None:
            assembly = self._assembly
            if self._is_told:
                assembly = knowing_items_of(self._run, state, where, assembly)
            assembly.task.check_state(state, where)
            assert isinstance(assembly.task, NextItemTask), "versions are of recommenders"
            self._given = ServedCatalog(assembly, put_catalog(self._store, assembly.task))
            if not is_of(state, assembly.task):
                _say_what_is_later(self._given.task, state, str(assembly.config.data.path))
        return self._given

    def _later_of(self, before: ModelVersion, state: RunState, where: str) -> ServedCatalog | None:
        """The catalog of a version, if it is a later one whose items the run knows."""
        bundles, config = CatalogBundles.of(before), self._assembly.config
        if self._later is not None and self._later.bundles == bundles:
            return self._later
        try:
            for bundle in (bundles.catalog, bundles.semantic_ids):
                if bundle is not None:
                    self._store.fetch(bundle)
        except InputError as error:
            raise InputError(
                f"{where}: would go on with the catalog of version {before.number}, which is damaged "
                f"({error}); name one: rayrec publish {self._run.path} {self._store.url} --data DATA"
            ) from error
        try:
            assembly = with_catalog_of(self._store, before, config, self._assembly.columns, state)
            assembly.task.check_state(state, where)
        except InputError as error:
            logger.warning("the catalog of version %d is not gone on with: %s", before.number, error)
            return None
        if is_of(state, assembly.task):
            return None
        self._later = ServedCatalog(assembly, bundles)
        _say_what_is_later(self._later.task, state, f"version {before.number}, which is gone on with")
        return self._later


def _say_what_is_later(task: NextItemTask, state: RunState, what: str) -> None:
    known_I = task.catalog_known_to(state).known_I
    logger.info(
        "the catalog of %s: %s items, of which %s came after the run was trained",
        what,
        f"{len(task.dataset.items):,}",
        "0" if known_I is None else f"{int((~known_I).sum()):,}",
    )

"""Users' events as a service of its own: how they come in, and how inference reads them.

POST /v1/events ─► gateway ─► features: EventIntake ─► state, log
inference: RecommendationService ─► RemoteState ─ users of a batch ─► features: their newest events
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI

from rayrec import __version__
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.versions.catalog import CatalogBundles
from rayrec.pipelines.versions.loading import assembly_of
from rayrec.pipelines.versions.manifest import ModelVersion
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.arrays import Int64Array
from rayrec.platform.circuit import Circuit
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.pointer import PointerFollower
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.web.error_handlers import add_error_handlers
from rayrec.serve.web.events import events_router
from rayrec.serve.web.metrics import Meter


class FeaturesPart:
    """Takes events and knows users' newest ones. Safe to call from several threads."""

    def __init__(self, intake: EventIntake, follower: PointerFollower | None = None) -> None:
        """
        Args:
            follower: keeps the catalog that of the version that serves; stopped with this.
        """
        self._intake, self._follower = intake, follower

    @staticmethod
    def open(run: str | Path, config: ServeConfig) -> FeaturesPart:
        """Open the state and the log of a run or of published versions, whose catalogs are followed.

        Raises:
            InputError: the run, the store or the log cannot be used.
            StoreUnavailableError: the store does not answer.
        """
        assert config.events is not None, "nobody would ask it"
        if not VersionStore.is_there(run):
            dataset = _dataset_of_run(run, config)
            return FeaturesPart(EventIntake.open(config.events, lambda: dataset))
        catalog = _ServedCatalog(VersionStore(run))
        intake = EventIntake.open(config.events, lambda: catalog.dataset)
        follower = PointerFollower(catalog.store, catalog.go_to)
        follower.start(config.follow_every_s)
        return FeaturesPart(intake, follower)

    def api(self, meters: Sequence[Meter] = ()) -> FastAPI:
        """What answers `/v1/events`."""
        api = FastAPI(title="RayRec, events", version=__version__)
        add_error_handlers(api)
        api.include_router(events_router(self._intake))
        for meter in meters:
            meter.watch(self._intake.metrics)
        return api

    @property
    def behaviors(self) -> tuple[str, ...] | None:
        """As `UserState.behaviors`."""
        return self._intake.state.behaviors

    def histories(self, user_ids: Sequence[int]) -> list[UserEvents]:
        """As `UserState.histories`."""
        return self._intake.state.histories(user_ids)

    def close(self) -> None:
        """Write what is left."""
        if self._follower is not None:
            self._follower.stop()
        self._intake.close()


class _ServedCatalog:
    """Users and items of the version that serves."""

    def __init__(self, store: VersionStore) -> None:
        """
        Raises:
            InputError: the version cannot be read, or recommends nothing.
        """
        self.store, self._version = store, store.serving()
        self.dataset = self._opened(self._version)

    def go_to(self, number: int) -> None:
        """Have the catalog of another version; one that is the same stays."""
        if number == self._version.number:
            return
        version = self.store.version(number)
        if CatalogBundles.of(version) != CatalogBundles.of(self._version):
            dataset = self._opened(version)
            kept, now = self.dataset.manifest, dataset.manifest
            if (kept.id_kinds, kept.behaviors) != (now.id_kinds, now.behaviors):
                raise InputError(
                    f"{self.store.url}: version {number} has other kinds of ids or other behaviors than "
                    "events are taken in here; start the service again for it"
                )
            self.dataset = dataset
        self._version = version

    def _opened(self, version: ModelVersion) -> Dataset:
        return _dataset_of(assembly_of(self.store, version), self.store.url)


def _dataset_of_run(run: str | Path, config: ServeConfig) -> Dataset:
    folder = RunFolder.open(Path(run))
    settings = folder.config if config.data is None else folder.config.with_data(config.data)
    assembly = assemble(settings.for_inference(), checksums=False, columns=folder.columns)
    return _dataset_of(assembly, str(run))


def _dataset_of(assembly: Assembly, where: str) -> Dataset:
    """
    Raises:
        InputError: its model names no items.
    """
    if not isinstance(assembly.task, NextItemTask):
        raise InputError(f"{where}: scores what is shown, and names no items")
    return assembly.task.dataset


class RemoteState:
    """A `UserState` that is read elsewhere; events come there by themselves."""

    def __init__(
        self,
        ask: Callable[[Sequence[int]], list[UserEvents]],
        behaviors: tuple[str, ...] | None,
        pause_s: float,
    ) -> None:
        """
        Args:
            ask: `FeaturesPart.histories`, wherever it runs; whatever it raises is taken for no answer.
            pause_s: in which it is not asked again after that.
        """
        self._ask, self._behaviors = ask, behaviors
        self._circuit = Circuit(pause_s)

    @property
    def behaviors(self) -> tuple[str, ...] | None:
        """As `UserState.behaviors`."""
        return self._behaviors

    def append(self, user_ids_E: Int64Array, events: UserEvents) -> int:
        """Not from here."""
        raise AssertionError("events are posted to the features part")

    def histories(self, user_ids: Sequence[int]) -> list[UserEvents]:
        """As `UserState.histories`."""
        return self._circuit(lambda: self._asked(user_ids))

    def close(self) -> None:
        """Nothing is open here."""

    def _asked(self, user_ids: Sequence[int]) -> list[UserEvents]:
        try:
            return self._ask(user_ids)
        except Exception as error:
            raise UnavailableError("the features part", 1, str(error)) from error

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
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.versions.loading import assembly_of
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.arrays import Int64Array
from rayrec.platform.circuit import Circuit
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.web.error_handlers import add_error_handlers
from rayrec.serve.web.events import events_router
from rayrec.serve.web.metrics import Meter


class FeaturesPart:
    """Takes events and knows users' newest ones. Safe to call from several threads."""

    def __init__(self, intake: EventIntake) -> None:
        self._intake = intake

    @staticmethod
    def open(run: str | Path, config: ServeConfig) -> FeaturesPart:
        """Open the state and the log of a run or of published versions.

        Raises:
            InputError: the run, the store or the log cannot be used.
            StoreUnavailableError: the store does not answer.
        """
        assert config.events is not None, "nobody would ask it"
        dataset = catalog_of(run, config)
        return FeaturesPart(EventIntake.open(config.events, lambda: dataset))

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
        self._intake.close()


def catalog_of(run: str | Path, config: ServeConfig) -> Dataset:
    """Users and items that events are of: those of a run, or of the version that is served at this moment.
    Which items are new to later versions does not matter to events.

    Raises:
        InputError: there is neither a run nor a version, or it recommends nothing.
    """
    if VersionStore.is_there(run):
        store = VersionStore(run)
        assembly = assembly_of(store, store.serving())
    else:
        folder = RunFolder.open(Path(run))
        settings = folder.config if config.data is None else folder.config.with_data(config.data)
        assembly = assemble(settings.for_inference(), checksums=False, columns=folder.columns)
    if not isinstance(assembly.task, NextItemTask):
        raise InputError(f"{run}: scores what is shown, and names no items")
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

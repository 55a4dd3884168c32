"""`rayrec nearline`: workers of a run or of published versions, in this process or as Ray actors.

NearlineLoop: the version that the pointer names ─► a NearlineWorker of it
              newer version ─► all active users, while the one before is kept up to date ─► it alone
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.pipelines.nearline.kinds import kinds_of
from rayrec.pipelines.nearline.product_store import ProductStore
from rayrec.pipelines.nearline.source import UserEventsSource
from rayrec.pipelines.nearline.worker import NearlineWorker
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.manifest import ModelVersion
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.graph import TemporalGraph, check_data
from rayrec.samples.stores import open_store, open_values
from rayrec.serve.launch.launch import stop_signal

logger = logging.getLogger(__name__)

POLL_S = 0.5
VERSIONS_EVERY_S = 2.0
AGAIN_AFTER_S = 10.0
"""After a version that could not be loaded, or a store of versions that did not answer."""
VERSIONS_KEPT = 2
"""The newest, and the one before, which may answer still."""


@dataclass(frozen=True)
class NearlineJob:
    """What is computed, for which model, of whose events."""

    run: str
    store: str
    events: str | None
    config: NearlineConfig
    graph: str | None = None
    snapshot: str = "best"
    device: str | None = None
    data: str | None = None
    ranking: RankingConfig | None = None


class NearlineReport(NamedTuple):
    """What workers did."""

    computed: int
    valid: int
    """Products that were there already."""
    seconds: float
    errors: int

    def rows(self) -> list[tuple[str, str]]:
        """For a table."""
        per_s = f", {self.computed / self.seconds:,.1f} a second" if self.seconds else ""
        return [
            ("computed", f"{self.computed:,}{per_s}"),
            ("there already", f"{self.valid:,}"),
            ("waited for a store", f"{self.errors:,} times"),
        ]


class NearlineLoop:
    """One worker's part of a job, for one version after the other. Not thread-safe."""

    def __init__(
        self,
        job: NearlineJob,
        part: int = 0,
        num_parts: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Raises:
            InputError: the model, a store or the graph cannot be opened, or a kind lacks what it needs.
            StoreUnavailableError: a store does not answer.
        """
        self._job, self._part, self._num_parts, self._clock = job, part, num_parts, clock
        self._store = ProductStore(open_values(job.store, create=True))
        self._events = None if job.events is None else open_store(job.events)
        self._graph = None if job.graph is None else TemporalGraph.open(job.graph)
        self._versions = VersionStore(job.run) if VersionStore.is_there(job.run) else None
        self._number: int | None = None
        self._looked_at, self._look_after_s = float("-inf"), VERSIONS_EVERY_S
        self._last_error: str | None = None
        self.worker: NearlineWorker
        self._before: NearlineWorker | None = None
        self._turn = 0
        self._identities = list[str]()
        """Of the newest version's products."""
        self._done = NearlineReport(0, 0, 0.0, 0)
        if self._versions is None:
            self.worker = self._worker_of(TrainedModel.load(job.run, job.snapshot, job.device, job.data))
        else:
            self._follow()

    def _worker_of(self, model: TrainedModel) -> NearlineWorker:
        job, recommender = self._job, Recommender(model)
        data = recommender.dataset
        if job.config.active_s and job.events is None and (not data.has_times() or data.has_order_alone()):
            raise InputError(
                f"--active-days: {data.root} does not say when events were, and no event store is named; "
                "leave it out"
            )
        stage = neighbors = None
        if job.ranking is not None:
            stage = RankingStage.load(recommender, job.ranking, job.device)
        if self._graph is not None:
            assert job.graph is not None
            check_data(self._graph, recommender.dataset, job.graph)
            neighbors = NeighborRecommender(recommender.dataset, self._graph)
        kinds = kinds_of(job.config, recommender, stage, neighbors)
        worker = NearlineWorker(
            recommender,
            kinds,
            UserEventsSource(recommender, self._events),
            self._store,
            job.config,
            self._part,
            self._num_parts,
            self._clock,
        )
        self._identities = sorted({recommender.identity, *(kind.identity for kind in kinds)})
        self._is_tidy = False
        return worker

    def _follow(self) -> None:
        """Have a worker of the version that serves, or that is to. Where that is not possible, the one that
        is there goes on, as replicas do.

        Raises:
            Exception: there is none yet.
        """
        assert self._versions is not None
        now = self._clock()
        if 0 <= now - self._looked_at < self._look_after_s:
            return
        self._looked_at, self._look_after_s = now, VERSIONS_EVERY_S
        try:
            self._go_to(self._versions.serving())
        except Exception as error:  # of a store, a file, or a model
            if self._number is None or isinstance(error, UnavailableError):  # which who calls tells
                raise
            # From now on: to fail may have taken longer than the pause.
            self._looked_at, self._look_after_s = self._clock(), AGAIN_AFTER_S
            self._done = self._done._replace(errors=self._done.errors + 1)
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.error("products of version %d go on: %s", self._number, error)
        else:
            self._last_error = None

    def _go_to(self, manifest: ModelVersion) -> None:
        assert self._versions is not None
        if manifest.number == self._number:
            return
        # First, since it may fail.
        worker = self._worker_of(load_version(self._versions, manifest, self._job.device).model)
        if self._number is not None and (self._before is None or self.worker.is_complete):
            # One that is not complete never answered; the one before it does.
            if self._before is not None:
                self._add(self._before)
            self._before = self.worker
        elif self._number is not None:
            self._add(self.worker)
        self.worker, self._number = worker, manifest.number
        logger.info("products of version %d are computed", manifest.number)

    def step(self) -> int:
        """Do a batch, of the version that is to serve first; returns its users.

        Raises:
            UnavailableError: a store does not answer; nothing is lost.
        """
        if self._versions is not None:
            self._follow()
        if self._before is not None and self.worker.is_complete:
            self._add(self._before)
            self._before = None
        # In turns: the version before answers until this one is complete.
        workers = [self.worker] if self._before is None else [self.worker, self._before]
        if self._turn % 2:
            workers.reverse()
        self._turn += 1
        for worker in workers:
            if count := worker.step():
                return count
        self._tidy()
        return 0

    def finish(self) -> None:
        """As `NearlineWorker.finish`."""
        self.worker.finish()
        self._tidy()

    def _tidy(self) -> None:
        """Remove products of versions that nobody goes back to, once those of the newest are there."""
        if self._is_tidy or self._part or not self.worker.is_complete:
            return
        if removed := self._store.keep_newest(self._job.run, self._identities, VERSIONS_KEPT):
            logger.info("%d products of earlier versions are removed", removed)
        self._is_tidy = True

    def run(self, is_stopped: Callable[[float], bool]) -> None:
        """As `NearlineWorker.run`."""
        while True:
            try:
                wait_s = 0.0 if self.step() else POLL_S
            except UnavailableError as error:
                self._done = self._done._replace(errors=self._done.errors + 1)
                logger.warning("near-line work waits: %s", error)
                wait_s = 10 * POLL_S
            if is_stopped(wait_s):
                return

    def _add(self, worker: NearlineWorker) -> None:
        done = self._done
        self._done = NearlineReport(
            done.computed + worker.num_computed,
            done.valid + worker.num_valid,
            done.seconds + worker.seconds,
            done.errors,
        )

    def report(self) -> NearlineReport:
        """What was done so far."""
        done = self._done
        of_workers = [worker for worker in (self.worker, self._before) if worker is not None]
        return NearlineReport(
            done.computed + sum(worker.num_computed for worker in of_workers),
            done.valid + sum(worker.num_valid for worker in of_workers),
            done.seconds + sum(worker.seconds for worker in of_workers),
            done.errors,
        )

    def close(self) -> None:
        self._store.close()
        if self._events is not None:
            self._events.close()


def work(job: NearlineJob, once: bool, single_process: bool, workers: int = 1) -> NearlineReport:
    """Compute products until interrupted, or once; call it on the main thread.

    Raises:
        InputError: as `NearlineLoop`; or events are to be followed and the store does not say what comes.
        StoreUnavailableError: a store does not answer when the work begins.
    """
    if single_process and workers > 1:
        raise InputError("--workers: are Ray actors; leave out --single-process")
    if not once:
        check_followed(job)
    if not single_process:
        return _on_ray(job, once, workers)
    loop = NearlineLoop(job)
    try:
        if once:
            loop.finish()
        else:
            with stop_signal() as stopped:
                loop.run(stopped.wait)
        return loop.report()
    finally:
        loop.close()


def check_followed(job: NearlineJob) -> None:
    """Refuse to wait for events that nobody tells of.

    Raises:
        InputError: there is no event store, or it has one side.
        StoreUnavailableError: it does not answer.
    """
    position = None
    if job.events is not None:
        store = open_store(job.events)
        try:
            position = store.feed_position()
        finally:
            store.close()
    if position is None:
        where = "no event store is named" if job.events is None else f"{job.events}: has one side"
        raise InputError(
            f"--events: {where}, so nothing says which events came; name a store with both sides (rayrec "
            "data store SOURCE STORE --by item builds the other one), or compute --once"
        )


def _on_ray(job: NearlineJob, once: bool, workers: int) -> NearlineReport:
    import ray

    from rayrec.actors.nearline import spawn_nearline_workers
    from rayrec.platform.cluster import ClusterConfig, ray_cluster

    with ray_cluster(ClusterConfig(), workers):
        actors = spawn_nearline_workers(partial(NearlineLoop, job, num_parts=workers), workers)
        try:
            reports: list[Any] = ray.get([actor.finish.remote() for actor in actors])
            if not once:
                with stop_signal() as stopped:
                    reports = run_actors(actors, stopped.wait)
        finally:
            for actor in actors:
                ray.kill(actor)
    return NearlineReport(*(sum(column) for column in zip(*reports, strict=True)))


def run_actors(actors: Sequence[Any], is_stopped: Callable[[float], bool]) -> list[Any]:
    """Have workers follow events until told to stop; their reports.

    Args:
        is_stopped: as of `NearlineWorker.run`.

    Raises:
        Exception: of a worker that has ended with it: nobody would look after its users any more.
    """
    import ray

    running = [actor.run.remote() for actor in actors]
    while not is_stopped(POLL_S):
        ended, _ = ray.wait(running, timeout=0)
        ray.get(ended)
    left = running
    while left:
        # Told again: one that Ray has restarted meanwhile has forgotten it.
        ray.get([actor.stop.remote() for actor in actors])
        _, left = ray.wait(left, num_returns=len(left), timeout=POLL_S)
    return ray.get(running)

"""From a run, or published versions, and settings to the application that answers, wherever it is held."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from fastapi import FastAPI

from rayrec.pipelines.inference.item_ranker import ItemRanker, UnloadedRanker, use_prefix_cache
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.merged_candidates import MergedCandidates
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.inference.tensor_parallel import check_split
from rayrec.pipelines.nearline.config import MOST_EVENTS
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.versions.loading import LoadedVersion, load_version
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.remote_files import absolute
from rayrec.samples.dataset.dataset import Dataset
from rayrec.serve.app.allocator import make_allocator, read_files
from rayrec.serve.app.shared_places import SharedPlaces
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batching import SWITCH_S, Batcher
from rayrec.serve.engine.compilation import CompileService, check_records
from rayrec.serve.engine.current import CurrentService, Service
from rayrec.serve.engine.following import VersionFollower
from rayrec.serve.engine.lists import ItemLists
from rayrec.serve.engine.live_graph import LiveGraph
from rayrec.serve.engine.products import ProductReader
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.warm_start import WarmStart
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.events.request_log import RequestLog
from rayrec.serve.events.user_state import UserState
from rayrec.serve.rpc.messages import SERVICE
from rayrec.serve.web.api import ANSWERING_ROUTES, build_api
from rayrec.serve.web.metrics import Meter
from rayrec.serve.web.models import together
from rayrec.serve.web.pages import RecentActivity
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest

logger = logging.getLogger(__name__)

RankerOf = Callable[[TrainedModel], ItemRanker]


@dataclass(frozen=True)
class _Opened:
    """What answers, and what lets it follow newer versions."""

    service: Service
    first: RecommendationService
    """That answers to begin with."""
    build: _Builder
    """Of what answers after it."""
    follower: VersionFollower | None = None


def load_models(
    run: str | Path, config: ServeConfig, meter_of: Callable[[str, str | None], Meter]
) -> FastAPI:
    """The application of all models of a service, each as `load_api` makes it.

    Args:
        run: of the first.
        meter_of: by a run, and a model's name where there are several.

    Raises:
        InputError: a model cannot be loaded; names it, where there are several.
    """
    if not config.models:
        return load_api(run, config, meter_of(str(run), None))
    # What is not there is found before the first takes its time.
    for each in config.models:
        with _of_model(each.name):
            device_of(each.run, config.beside[each.name])
    first, others, places = load_api(run, config, meter_of(str(run), config.name)), [], SharedPlaces()
    places.add(config, first.state.catalog())
    for each in config.models:
        with _of_model(each.name):
            other = load_api(each.run, config.beside[each.name], meter_of(each.run, each.name))
            places.add(config.beside[each.name], other.state.catalog())
        others.append(other)
    return together([first, *others])


@contextmanager
def _of_model(name: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        kind = MachineError if isinstance(error, MachineError) else InputError
        raise kind(f"models: {name}: {error}") from error


def load_api(
    run: str | Path,
    config: ServeConfig,
    meter: Meter,
    ranker_of: RankerOf | None = None,
    user_state: UserState | None = None,
) -> FastAPI:
    """The application, warmed up; the time that batches take has been measured, which takes a moment.

    Sets the number of threads that PyTorch has in this process, and until the application shuts down the
    interpreter's switch interval. What is loaded for good is spared the garbage collector: a look at it takes
    a quarter of a second, in which nobody is answered. When the application shuts down, nothing is loaded in
    the background any more, and the collector sees everything again.

    Args:
        run: folder of a run, or folder or URL with published versions, which are followed.
        meter: for operators of the service.
        ranker_of: the network of a model that is elsewhere; None: in this process.
        user_state: what users did of late, where events come to another process.

    Raises:
        InputError: the run, the version, or that of the ranking stage, cannot be loaded, or its answers are
            not those of a model.
    """
    _use_threads(config.threads)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    compilation = None
    _check_records(run, config)
    if config.compile is not None:
        compilation = CompileService(
            _folder_of(run), config.compile, config.threads, config.admission.fewer_beams
        )
    warm_start = None if config.warm_start is None else WarmStart(config.warm_start)
    if compilation is not None and warm_start is not None:
        compilation.expected = warm_start.left.buckets
    _spare_collector()
    opened = _open(run, config, config.device, compilation, ranker_of)
    # What stays as long as the application has none of the first version, which others follow.
    service, first, build, follower = opened.service, opened.first, opened.build, opened.follower
    intake = None
    build.user_state = first.user_state = user_state
    if config.events is not None:
        events = config.events
        if config.nearline is not None:
            # Chunks are counted from the beginning of a history, and products stand for all of it.
            events = events.model_copy(update={"last": max(events.last, MOST_EVENTS)})
        intake = EventIntake.open(events, lambda: service.pinned.dataset)
        build.user_state = first.user_state = intake.state
    if (live_graph := build.live_graph) is not None:
        live_graph.start()
        meter.watch(live_graph.metrics)
    if build.products is not None:
        first.products = build.products
        meter.watch(build.products.metrics)
    lists = None
    if keeps_lists(config):
        lists = build.item_lists = first.item_lists = ItemLists(config.lists)
    request_log = (
        None
        if config.request_log is None
        else RequestLog(config.request_log, config.target, model_name=config.name)
    )
    first.warm_up()
    first.check_answers()
    if compilation is not None:
        first.compile(compilation)
    costs = first.measured_costs(config.max_batch, config.timeout_s / 2)
    if warm_start is not None:
        # After the costs, which would read what is kept of these users as if it were usual.
        warm_start.warm(first, costs.max_size)
        build.warm_start = first.warm_start = warm_start
        warm_start.start((dict) if compilation is None else (lambda: compilation.asked))
        meter.watch(warm_start.metrics)
    routes = (*ANSWERING_ROUTES, f"/{SERVICE}/ModelInfer")
    meters = [meter, RecentActivity(routes)] if config.shows_page else [meter]

    def on_batch(num_requests: int, seconds: float) -> None:
        for each in meters:
            each.batch(num_requests, seconds)

    def compute(requests: Sequence[RecommendRequest]) -> list[RecommendAnswer | Exception]:
        return service.pinned.recommend_all(requests)

    # Of its thread: another model's may have another number.
    use_threads = partial(_use_threads, config.threads)
    batcher = Batcher(compute, costs, config.max_waiting, on_batch=on_batch, before_batch=use_threads)
    allocator = None
    if (allocate := config.admission.allocate) is not None:
        allocator = make_allocator(allocate, first, batcher, costs.max_size)
    on_close: list[Callable[[], None]] = [gc.unfreeze, partial(sys.setswitchinterval, switch_s)]
    if follower is None:
        _spare_collector()
    else:  # its model is replaced, and the collector has to find what is left of it
        follower.look()  # a canary that runs has its share before the first request
        follower.start(config.follow_every_s)
        on_close.append(follower.stop)
    if warm_start is not None:
        on_close.append(warm_start.close)
    if compilation is not None:
        on_close.append(compilation.close)
    if build.products is not None:
        on_close.append(build.products.close)
    if live_graph is not None:
        on_close.append(live_graph.stop)
    api = build_api(
        service,
        batcher,
        config.timeout_s,
        config.admission,
        meters,
        intake,
        request_log,
        allocator,
        on_close,
        None if follower is None else follower.metrics,
        lists,
        config.name,
    )
    api.state.has_token = config.token_sha256 is not None
    api.state.catalog = lambda: service.pinned.dataset
    return api


def _use_threads(number: int) -> None:
    """Let PyTorch have so many in what this thread calls, and threads that begin later."""
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def keeps_lists(config: ServeConfig) -> bool:
    """Whether lists that are put to one process are those of all that answer."""
    return config.lists is not None or (config.most_replicas == 1 and config.services is None)


def _spare_collector() -> None:
    """What is there now is not looked at for garbage any more."""
    gc.collect()
    gc.freeze()


def load_service(run: str | Path, config: ServeConfig, device: str | None) -> RecommendationService:
    """Load what answers, without HTTP around it.

    Args:
        run: as `load_api`.
        device: to compute on; None takes that of the run.

    Raises:
        InputError: the run, the version, or that of the ranking stage, cannot be loaded.
    """
    return _open(run, config, device).first


def check_models(run: str | Path, config: ServeConfig) -> None:
    """As `check_service`, of all models of a service."""
    places = SharedPlaces()
    places.add(config, check_service(run, config))
    for each in config.models:
        with _of_model(each.name):
            places.add(config.beside[each.name], check_service(each.run, config.beside[each.name]))


def check_service(run: str | Path, config: ServeConfig) -> Dataset:
    """Check that what answers can be loaded, on the CPU and without the rows of its tables and its weights,
    which are most of it.

    Args:
        run: as `load_api`.

    Returns:
        The data set that it answers with.

    Raises:
        InputError: the run, the version, or that of the ranking stage, cannot be loaded, or curves or values.
    """
    _check_records(run, config)
    if (allocate := config.admission.allocate) is not None:
        read_files(allocate)
    # The CPU is always here; this machine may lack the device of the replicas.

    def network_of(model: TrainedModel) -> ItemRanker:
        ranker = UnloadedRanker.of(model)
        if (sizes := config.context_sizes) is not None:
            use_prefix_cache(ranker, model, replace(sizes, disk=0))  # it says whether there may be one
        if config.services is not None and (dense := config.services.dense).tensor_parallel > 1:
            check_split(ranker.model, dense.tensor_parallel, model.run, dense.fused_communication)
        return ranker

    opened = _open(run, config, HOST.kind, ranker_of=network_of, loads=False)
    if opened.build.live_graph is not None:
        opened.build.live_graph.stop()  # its store stays closed to the process that starts others
    return opened.first.dataset


def _check_records(run: str | Path, config: ServeConfig) -> None:
    """Refuse recordings on a device that has none, before anything is loaded."""
    if config.compile is not None and config.compile.graphs:
        check_records(device_of(run, config))


def device_of(run: str | Path, config: ServeConfig) -> str:
    """That the model computes on.

    Raises:
        InputError: there is neither a run nor a version.
    """
    if config.device is not None:
        return config.device
    if VersionStore.is_there(run):
        return VersionStore(run).serving().device
    return RunFolder.open(Path(run)).config.device


def _folder_of(run: str | Path) -> Path | None:
    """That of a run, or of versions, if it is one of this machine."""
    location = absolute(str(run))
    return None if "://" in location else Path(location)


def _open(
    run: str | Path,
    config: ServeConfig,
    device: str | None,
    compilation: CompileService | None = None,
    ranker_of: RankerOf | None = None,
    loads: bool = True,
) -> _Opened:
    build = _Builder(config, device, ranker_of)
    if not VersionStore.is_there(run):
        service = build(TrainedModel.load(run, config.snapshot, device, config.data, loads, loads))
        return _Opened(service, service, build)
    if config.data is not None or config.snapshot != "best":
        raise InputError(
            f"{run}: holds published versions, which have their catalog with them and are chosen with "
            "`rayrec rollback`; leave out --data and --snapshot"
        )
    store = VersionStore(run)
    loaded = load_version(store, store.serving(), device, with_rows=loads, with_weights=loads)
    service = build(loaded.model)
    current = CurrentService(service)

    def build_next(version: LoadedVersion) -> RecommendationService:
        _use_threads(config.threads)
        following = build(version.model, current.pinned)
        if compilation is not None:  # what has a program keeps it, and nobody waits for others
            following.compile(compilation, waits=False)
        following.warm_up()
        return following

    follower = VersionFollower(store, current, loaded, build_next, device)
    if build.products is not None and config.nearline is not None:
        follower.wait_for(build.products.is_covered, config.nearline.wait_s)
    return _Opened(current, service, build, follower)


class _Builder:
    """Services for one model after the other, with one ranking model after them."""

    def __init__(self, config: ServeConfig, device: str | None, ranker_of: RankerOf | None) -> None:
        self.user_state: UserState | None = None
        self.item_lists: ItemLists | None = None
        self.warm_start: WarmStart | None = None
        self._config, self._ranker_of = config, ranker_of
        self.live_graph = (
            None if config.neighbors is None else LiveGraph(config.neighbors, config.followed_store)
        )
        self.products = None if config.nearline is None else ProductReader.open(config.nearline)
        self._scorer: Scorer | None = None
        if (ranking := config.ranking) is not None:
            self._scorer = Scorer.load(ranking.run, ranking.snapshot, device, ranking.data)
            if config.compile is not None:
                sizes = [ranking.candidates * num_requests for num_requests in config.compile.row_counts]
                if self._scorer.compile(sizes):
                    logger.info("the ranking model scores up to %d rows by programs of XLA", sizes[-1])

    def __call__(
        self, model: TrainedModel, before: RecommendationService | None = None
    ) -> RecommendationService:
        """Make the service of a model.

        Args:
            before: as `RecommendationService` takes it.

        Raises:
            InputError: the ranking model cannot rank for this one, or neighbors are of another log.
        """
        ranker = None if self._ranker_of is None else self._ranker_of(model)
        recommender, stage = Recommender(model, ranker), None
        neighbors = None
        if self.live_graph is not None:
            self.live_graph.check_data(recommender.dataset)
            neighbors = NeighborRecommender(recommender.dataset, self.live_graph.graph, self.live_graph.now)
        if ranker is None and (sizes := self._config.context_sizes) is not None:
            recommender.use_prefix_cache(sizes)
        if self._scorer is not None:
            assert self._config.ranking is not None
            candidates: Recommender | MergedCandidates = recommender
            if neighbors is not None:
                assert self._config.neighbors is not None
                candidates = MergedCandidates(recommender, neighbors, self._config.neighbors.share)
            stage = RankingStage(candidates, self._scorer, self._config.ranking)
        service = RecommendationService(recommender, self._config.max_k, stage, before, neighbors)
        service.user_state, service.item_lists = self.user_state, self.item_lists
        service.products, service.warm_start = self.products, self.warm_start
        return service

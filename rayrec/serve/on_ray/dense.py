"""The dense part of inference: networks by version, asked with packed batches; and how the sparse part asks.

sparse part: Recommender ─► RemoteRanker ─ one buffer ─► DensePart: the network of the batch's version
                                                          └ not there: loaded now, the least lately asked goes
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rayrec.models.decoding.beam import beams_for
from rayrec.models.decoding.beam_policy import Beams
from rayrec.models.program.program import AllowedItems, RankedItems, Rows
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.pipelines.inference.item_ranker import give_catalog, item_ranker_of, use_prefix_cache
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.versions.loading import LoadedVersion, load_version
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import own_stream, synchronize
from rayrec.samples.base.batches import FeatureBatch
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.service import prefix_cache_metrics
from rayrec.serve.on_ray.packed_batch import RankBatch, packed_items, unpacked_items, version_of

MOST_VERSIONS = 3
"""Held: the one that answers, the one before, and one that sparse parts are going to or coming from."""

Load = Callable[[int | None], SequenceProgram]
"""The network of a version."""
Split = Callable[[SequenceProgram], None]
"""What takes this rank's part of a network, where several compute it together; all of them at once."""


class DensePart:
    """Ranks packed batches. Safe to call from several threads."""

    def __init__(
        self, load: Load, streams: int = 1, split: Split | None = None, check: Split | None = None
    ) -> None:
        """
        Args:
            streams: batches that are computed at a time.
            split: None: the network is whole here.
            check: whether it could be split, which is asked before others take part.
        """
        self._load, self._split, self._check = load, split, check
        self._read: dict[int | None, SequenceProgram] = {}
        """Networks that are whole still, and answer nobody so far."""
        self._programs: OrderedDict[int | None, SequenceProgram] = OrderedDict()
        self._streams, self._of_thread = threading.Semaphore(streams), threading.local()
        self._loading, self._adding, self._holding = threading.Lock(), threading.Lock(), threading.Lock()

    @staticmethod
    def open(run: str | Path, config: ServeConfig, streams: int = 1) -> DensePart:
        """Of a run, or of published versions; with the one that answers to begin with.

        Raises:
            InputError: the run or the version cannot be loaded.
        """
        part = DensePart.of(run, config, streams)
        part.hold(first_version(run))
        return part

    @staticmethod
    def of(
        run: str | Path,
        config: ServeConfig,
        streams: int = 1,
        split: Split | None = None,
        check: Split | None = None,
    ) -> DensePart:
        """The same without any network."""
        torch.set_num_threads(config.threads)
        if VersionStore.is_there(run):
            return DensePart(_VersionLoader(VersionStore(run), config), streams, split, check)
        return DensePart(lambda version: _of_run(run, config, version), streams, split, check)

    def beam_width(self) -> int:
        """Of the version that was asked last; 0 of a model that scores every item."""
        with self._holding:
            program = next(reversed(self._programs.values()))
        return program.num_beams(0)

    def hold(self, version: int | None) -> None:
        """Load a version, if it is not there.

        Raises:
            InputError: it cannot be loaded.
        """
        self._program(version)

    def holds(self, version: int | None) -> bool:
        with self._holding:
            return version in self._programs

    def read(self, version: int | None) -> None:
        """Load a version without asking other ranks for anything, so that `hold` takes no time.

        Raises:
            InputError: it cannot be loaded, or not be split.
        """
        with self._loading:
            if version not in self._read and not self.holds(version):
                self._read[version] = self._loaded(version)

    def forget(self, version: int | None) -> None:
        """Drop a version that was read and will not be held, as another rank could not read it."""
        with self._loading:
            self._read.pop(version, None)

    def _loaded(self, version: int | None) -> SequenceProgram:
        program = self._load(version)
        if self._check is not None:
            self._check(program)
        return program

    def _taken(self, version: int | None) -> SequenceProgram:
        """A version that was read, or else is loaded now."""
        with self._loading:
            program = self._read.pop(version, None)
            return self._loaded(version) if program is None else program

    def recommend(self, packed: bytes) -> bytes:
        """Best items of a packed `RankBatch`."""
        return self.answer(RankBatch.unpacked(packed))

    def answer(self, batch: RankBatch) -> bytes:
        """The same of one that was unpacked."""
        program = self._program(batch.version)
        with self._streams, self._stream_of_thread(program.device):
            ranked = program.recommend(
                batch.features, batch.rows, batch.k, batch.excluded_BE, batch.beams_B, batch.allowed
            )
        return packed_items(ranked)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        with self._holding:
            programs = list(self._programs.values())
        metrics = {"dense_versions": float(len(programs))}
        for program in programs:
            if (kept := program.model.prefix_cache) is not None:
                for name, value in prefix_cache_metrics(kept).items():
                    metrics[name] = metrics.get(name, 0) + value
        return metrics

    def _stream_of_thread(self, device: torch.device) -> AbstractContextManager[Any]:
        """The same each time that a thread asks: the device's allocator keeps buffers by stream."""
        if (stream := getattr(self._of_thread, "stream", None)) is None:
            stream = self._of_thread.stream = own_stream(device)
        kept: AbstractContextManager[Any] = stream
        return kept

    def _program(self, version: int | None) -> SequenceProgram:
        if (program := self._held(version)) is not None:
            return program
        with self._adding:  # batches of versions that are there do not wait for it
            if (program := self._held(version)) is not None:
                return program
            program = self._taken(version)
            if self._split is not None:
                self._split(program)
            synchronize(program.device)  # threads have streams of their own, which would not wait for it
            with self._holding:
                self._programs[version] = program
                while len(self._programs) > MOST_VERSIONS:
                    self._programs.popitem(last=False)
            return program

    def _held(self, version: int | None) -> SequenceProgram | None:
        with self._holding:
            if (program := self._programs.get(version)) is not None:
                self._programs.move_to_end(
                    version
                )  # after a rollback, the one that answers is not the newest
            return program


class Networks(Protocol):
    """What answers packed batches: a `DensePart`, or a gang of them."""

    def holds(self, version: int | None) -> bool: ...

    def hold(self, version: int | None) -> None: ...

    def recommend(self, packed: bytes) -> bytes: ...


class DenseThreads:
    """Threads that compute, as many as batches at a time, and one on which versions are loaded that are
    not there: batches of those that are do not wait for it."""

    def __init__(self, networks: Networks, streams: int) -> None:
        self._networks = networks
        self._computing = ThreadPoolExecutor(streams, "dense")
        self._loading = ThreadPoolExecutor(1, "dense versions")

    async def recommend(self, packed: bytes) -> bytes:
        """As `DensePart.recommend`."""
        loop, version = asyncio.get_running_loop(), version_of(packed)
        if not self._networks.holds(version):
            await loop.run_in_executor(self._loading, self._networks.hold, version)
        return await loop.run_in_executor(self._computing, self._networks.recommend, packed)


def first_version(run: str | Path) -> int | None:
    """That answers to begin with; None of a run, which has one."""
    return VersionStore(run).serving().number if VersionStore.is_there(run) else None


class _VersionLoader:
    """Networks of a store's versions, which share settings and catalog where these are the same."""

    def __init__(self, store: VersionStore, config: ServeConfig) -> None:
        self._store, self._config, self._device = store, config, config.device
        self._held: LoadedVersion | None = None
        self._with_rows = False

    def __call__(self, version: int | None) -> SequenceProgram:
        assert version is not None, "sparse parts of a store name the version"
        manifest = self._store.version(version)
        loaded = load_version(self._store, manifest, self._device, self._held, self._with_rows)
        program = item_ranker_of(loaded.model)
        if program.table_of_catalog is not None and not self._with_rows:
            self._with_rows = True
            loaded = load_version(self._store, manifest, self._device)
        give_catalog(program, loaded.model)
        _use_prefix_cache(program, loaded.model, self._config)
        self._held = loaded
        return program


def _of_run(run: str | Path, config: ServeConfig, version: int | None) -> SequenceProgram:
    assert version is None, "a run has one version"

    def load(with_rows: bool) -> TrainedModel:
        return TrainedModel.load(run, config.snapshot, config.device, config.data, with_rows)

    model = load(with_rows=False)
    program = item_ranker_of(model)
    if program.table_of_catalog is not None:
        model = load(with_rows=True)
    give_catalog(program, model)
    _use_prefix_cache(program, model, config)
    return program


def _use_prefix_cache(program: SequenceProgram, model: TrainedModel, config: ServeConfig) -> None:
    """Whether this deployment keeps prefixes.

    Raises:
        InputError: it has to be, and the model cannot.
    """
    if (sizes := config.context_sizes) is not None:
        use_prefix_cache(program, model, sizes)


class RemoteRanker:
    """The network of a version in a dense part elsewhere."""

    def __init__(self, ask: Callable[[bytes], bytes], version: int | None, beam_width: int) -> None:
        """
        Args:
            ask: `DensePart.recommend`, wherever it runs.
            beam_width: of the model, 0 where it scores every item.
        """
        self._ask, self._version, self._beam_width = ask, version, beam_width

    def recommend(
        self,
        features: FeatureBatch,
        rows: Rows,
        k: int,
        excluded_BE: Int64Array | None,
        beams_B: Sequence[Beams] | None = None,
        allowed: AllowedItems | None = None,
    ) -> RankedItems:
        """As `SequenceProgram.recommend`."""
        arrays = {name: np.asarray(rows[name]) for name in features.lookups}
        batch = RankBatch(self._version, features, arrays, k, excluded_BE, beams_B, allowed)
        return unpacked_items(self._ask(batch.packed()))

    def num_beams(self, k: int, max_beams: int | None = None) -> int:
        """As `SequenceProgram.num_beams`."""
        return beams_for(k, self._beam_width, max_beams) if self._beam_width else 0

"""Silent data corruption: compute steps of a run again, and compare every bit of what comes of them.

    snapshot A (step a) ─► actors of their own ─► steps a + 1 to t ─► weights, optimizer states, rows
                                                                        │ compared, hash by hash
    snapshot B (step t), which the run wrote ───────────────────────────┘

A run with the same number of trainers has the same bits wherever it is computed, so a difference is an error
of a machine: of the one that computed it then, or of the one that did now. Nothing of the run's folder is
changed.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayrec.embeddings.base.routing import NUM_BUCKETS, ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.snapshot.saved_files import SavedFile
from rayrec.embeddings.snapshot.snapshot import load_tables
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import TableRows
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import ATTENTION_FILES, RunFolder
from rayrec.pipelines.runs.snapshots import Snapshot, read_snapshot
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.sizes import with_sizes
from rayrec.pipelines.training.initial_weights import initial_snapshot
from rayrec.pipelines.training.pipeline import TrainingPipeline
from rayrec.pipelines.training.placements import OnRay, Placement, in_process, on_ray
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.errors import InputError
from rayrec.platform.health.findings import Action, Finding, Verdict
from rayrec.platform.metrics import RayMetrics

logger = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"
BYTES_AT_ONCE = 256 * 2**20
"""Of rows that are compared together; the tables of a large run do not fit into one process."""
AGREEING_TRAINERS = 2
"""Up to so many have the same bits on a cluster and in one process; see `placements`."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
"""After a failure in the background; twice as long after each further one."""

Chain = Sequence[Sequence[Path]]


@dataclass(frozen=True)
class Difference:
    """One thing that came out otherwise."""

    name: str
    """`weights NAME`, `optimizer NAME` or `rows of TABLE`."""
    detail: str
    """Where it differs first, and how much of it does."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True)
class ReplayReport:
    """What came of a replay."""

    run: str
    from_step: int
    """The snapshot that was begun with; 0 is the beginning of the run."""
    step: int
    """The one that was compared with."""
    verdict: Verdict
    """`bad` if anything differs; `unknown` if it may differ for another reason, which `note` says."""
    num_compared: int
    """Tensors, and tables of rows."""
    differences: tuple[Difference, ...]
    hash: str
    """Of everything that the run recorded at the step."""
    replayed_hash: str
    nodes: tuple[str, ...]
    """Where it was computed again, by trainer."""
    seconds: float
    note: str = ""

    def finding(self) -> Finding:
        """For `worst`, metrics and quarantine: of the run, since it is open which machine was wrong."""
        first = f"; first: {self.differences[0]}" if self.differences else ""
        steps = f"steps {self.from_step + 1} to {self.step}, again on {', '.join(dict.fromkeys(self.nodes))}"
        code, subject, count = "replay-differs", f"run {Path(self.run).name}", len(self.differences)
        # One replay does not say whether the run's machine was wrong or this one.
        action: Action = "avoid" if self.verdict == "bad" else "none"
        return Finding(code, subject, self.verdict, count, 0, action, f"{steps}{first} {self.note}".rstrip())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    run: str | Path,
    step: int,
    cluster: Placement = on_ray,
    address: str | None = None,
    nodes: Sequence[str] = (),
) -> ReplayReport:
    """Compute the steps before a snapshot of a run again, from the snapshot before it, and compare all bits.

    Takes as long as the steps took, and as much room on the cluster as the run.

    Args:
        step: of the snapshot to compare with: `step-000000400` is that of step 400.
        cluster: where to compute; as for `train`.
        address: of the Ray cluster, if it is not that of the run's settings.
        nodes: Ray ids of the nodes to compute on; empty lets the cluster choose.

    Raises:
        InputError: there is no such run or snapshot, it is damaged, or its settings do not have the same bits
            every time.
        Exception: what a stage failed with.
    """
    folder = RunFolder.open(Path(run))
    config = _replayed_config(folder.config, address, nodes)
    base, recorded = _snapshots(folder, step)
    assembly = assemble(config)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rayrec-replay-", dir=folder.path.parent) as scratch:
        again = _compute_again(folder, assembly, base, recorded, cluster, Path(scratch))
        comparison = _Comparison()
        comparison.tensors("weights", recorded.weights, again.weights)
        comparison.tensors("optimizer", recorded.optimizer_state, again.optimizer_state)
        comparison.tables(assembly.tables, recorded.sparse_chain, [again.files])
    note = "" if not comparison.differences else _other_reason(folder, config, recorded, cluster)
    verdict: Verdict = "ok" if not comparison.differences else "unknown" if note else "bad"
    return ReplayReport(
        str(folder.path),
        0 if base is None else base.committed_step + 1,
        step,
        verdict,
        comparison.num_compared,
        tuple(comparison.differences),
        comparison.recorded.hexdigest(),
        comparison.replayed.hexdigest(),
        again.nodes,
        time.monotonic() - began,
        note,
    )


def replay_newest(
    run: str | Path,
    after: int = 0,
    cluster: Placement = on_ray,
    address: str | None = None,
    nodes: Sequence[str] = (),
) -> ReplayReport | None:
    """Replay the newest snapshot of a run that has one before it; for a watch that looks now and then.

    Args:
        after: the step that was replayed last.

    Returns:
        None where there is no newer snapshot with another before it.
    """
    steps = _steps(RunFolder.open(Path(run)))
    if len(steps) < 2 or steps[-1] <= after:
        return None
    return replay(run, steps[-1], cluster, address, nodes)


class NoRoomNowError(Exception):
    """A replay in the background finds no room; one sentence."""


class OnRayWithRoom(OnRay):
    """A cluster on which what finds no room at once is refused, so that it asks again later."""

    @contextmanager
    def running(
        self, run: str, assembly: Assembly, folder: Path | None, hang_timeout_s: float
    ) -> Iterator[Stages]:
        # Only here: these modules need Ray.
        from rayrec.pipelines.cluster.nodes import cluster_nodes
        from rayrec.pipelines.cluster.placement import NoNodeError, actor_groups, assign

        try:
            assign(actor_groups(assembly.config), cluster_nodes())
        except NoNodeError as error:
            raise NoRoomNowError(
                f"{error} now, and a replay in the background does not wait for it"
            ) from None
        with super().running(run, assembly, folder, hang_timeout_s) as stages:
            yield stages


on_ray_with_room = OnRayWithRoom()


def _replay_newest_with_room(run: str | Path, after: int, address: str | None) -> ReplayReport | None:
    return replay_newest(run, after, on_ray_with_room, address)


class BackgroundReplay:
    """Replays the newest steps of a run on a thread beside a watch, one replay at a time.

    The thread does not hold the process up when it ends. A replay that finds no room, or fails, is tried
    again after a pause, which doubles.
    """

    def __init__(
        self,
        run: str | Path,
        address: str | None = None,
        replay_again: Callable[..., ReplayReport | None] = _replay_newest_with_room,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            replay_again: as `replay_newest`.
            clock: seconds.
        """
        self._run, self._address, self._replay = run, address, replay_again
        self._clock = clock
        self._last_step = 0
        self._pause_s, self._not_before_s = FIRST_PAUSE_S, clock()
        self._running: Future[ReplayReport | None] | None = None
        self._counts = Counter[str]()
        self._metrics = RayMetrics({"run": RunFolder.open(Path(run)).name})

    def look(self) -> ReplayReport | None:
        """Take what a replay found that is over, and begin the next one; returns at once.

        What fails, as a replay of a snapshot that has been deleted meanwhile, is logged.
        """
        report: ReplayReport | None = None
        if self._running is not None and self._running.done():
            done, self._running = self._running, None
            try:
                report = done.result()
                self._pause_s = FIRST_PAUSE_S
            except Exception as error:
                logger.warning(
                    "%s was not replayed, and will be again in %.0f s: %s", self._run, self._pause_s, error
                )
                self._not_before_s = self._clock() + self._pause_s
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if report is not None:
            self._last_step = report.step
            self._counts["replays_total"] += 1
            self._counts["replay_differences_total"] += len(report.differences)
            self._metrics.publish(self._counts)
        if self._running is None and self._clock() >= self._not_before_s:
            self._running = self._begin()
        return report

    def _begin(self) -> Future[ReplayReport | None]:
        # Not an executor, whose threads the interpreter waits for at its end.
        future: Future[ReplayReport | None] = Future()

        def run() -> None:
            try:
                future.set_result(self._replay(self._run, self._last_step, address=self._address))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="replay", daemon=True).start()
        return future

    def wait(self) -> None:
        """Until the replay that is running is over."""
        if self._running is not None:
            wait([self._running])


def _steps(folder: RunFolder) -> list[int]:
    names = [re.fullmatch(r"step-(\d+)", name) for name in folder.snapshot_names()]
    return [int(name[1]) for name in names if name is not None]


def _snapshots(folder: RunFolder, step: int) -> tuple[Snapshot | None, Snapshot]:
    """The newest snapshot before a step's, None where it is the run's first; and that of the step."""
    steps = _steps(folder)
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise InputError(f"--step {step}: {folder.path} has no snapshot of that step; it has {there}")
    recorded = read_snapshot(folder.snapshot_path(step))
    before = [each for each in steps if each < step]
    return (read_snapshot(folder.snapshot_path(before[-1])) if before else None), recorded


def _replayed_config(config: RunConfig, address: str | None, nodes: Sequence[str]) -> RunConfig:
    if config.pipeline.mode == "bounded_stale":
        raise InputError(
            "pipeline.mode: bounded_stale reads rows as they happen to arrive, and gives other bits every "
            "time; only runs of sync and exact_prefetch can be replayed"
        )
    config = with_sizes(config.with_absolute_paths())
    if address is not None:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": address})})
    if not nodes:
        return config
    label = {NODE_LABEL: f"in({','.join(nodes)})"}
    placement = config.placement
    chosen = {
        part: getattr(placement, part).model_copy(update={"labels": label})
        for part in ("servers", "trainers")
    }
    return config.model_copy(update={"placement": placement.model_copy(update=chosen)})


@dataclass(frozen=True)
class _Again:
    """What the steps gave this time."""

    weights: Mapping[str, np.ndarray]
    optimizer_state: Mapping[str, np.ndarray]
    files: list[Path]
    """All rows."""
    nodes: tuple[str, ...]


def _compute_again(
    folder: RunFolder,
    assembly: Assembly,
    base: Snapshot | None,
    recorded: Snapshot,
    cluster: Placement,
    scratch: Path,
) -> _Again:
    initial = initial_snapshot(assembly) if base is None else None
    current = assembly.learning_on(base or initial).going_on_from(base, folder.path)
    for file in folder.path.glob(ATTENTION_FILES):  # which kernels were chosen decides about bits
        shutil.copy(file, scratch)
    name = f"{folder.name}-replay-{scratch.name[-8:]}"
    hang_timeout_s = assembly.config.recovery.hang_timeout_s
    with (
        cluster.connected(current),
        cluster.running(name, current, scratch.resolve(), hang_timeout_s) as stages,
    ):
        first = 0
        if base is not None:
            first = base.committed_step + 1
            stages.load(base, base.committed_step, base.state.incarnation + 1)
        elif initial is not None:
            stages.load(initial, -1, 1, weights_only=True)
        pipeline = TrainingPipeline(stages, assembly.config.pipeline.queue_depth)
        nodes: tuple[str, ...] = ()
        for result in pipeline.run(first, recorded.committed_step + 1):
            nodes = tuple(work.node for work in result.work)
        return _state_of(stages, pipeline, recorded.committed_step, scratch, nodes)


def _state_of(
    stages: Stages, pipeline: TrainingPipeline, step: int, scratch: Path, nodes: tuple[str, ...]
) -> _Again:
    pending = pipeline.begin_snapshot(step)
    stages.watch.get(pending.drained)
    weights, optimizer_state = stages.watch.get([pending.weights, pending.optimizer_state])
    rows = scratch / "rows"
    rows.mkdir()
    saving = [server.save.remote(str(rows.resolve()), step, None) for server in stages.servers]
    saved: list[list[SavedFile]] = stages.watch.get(saving, may_take_long=True)
    files = [rows / file.name for of_server in saved for file in of_server]
    return _Again(weights, optimizer_state, files, nodes)


def _other_reason(folder: RunFolder, config: RunConfig, recorded: Snapshot, cluster: Placement) -> str:
    """Why bits may differ although no machine was wrong; empty if nothing is known that would explain it."""
    if recorded.state.incarnation != folder.state.get("incarnation", recorded.state.incarnation):
        return (
            "the run was begun again since that snapshot, perhaps with another number of trainers or other "
            "threads; replay a newer one"
        )
    if cluster is in_process and config.pipeline.num_trainers > AGREEING_TRAINERS:
        return "several trainers in one process add in another order than on a cluster; replay on Ray"
    return ""


class _Comparison:
    """Collects hashes of both sides, and what differs."""

    def __init__(self) -> None:
        self.recorded, self.replayed = hashlib.sha256(), hashlib.sha256()
        self.num_compared = 0
        self.differences: list[Difference] = []

    def tensors(
        self, kind: str, recorded: Mapping[str, np.ndarray], replayed: Mapping[str, np.ndarray]
    ) -> None:
        for name in sorted({*recorded, *replayed}):
            ours, theirs = recorded.get(name), replayed.get(name)
            digests = [b"" if each is None else _digest(each) for each in (ours, theirs)]
            if not self._agree(digests):
                self.differences.append(Difference(f"{kind} {name}", _difference(ours, theirs)))
            self.num_compared += 1

    def tables(self, tables: Sequence[TableConfig], recorded: Chain, replayed: Chain) -> None:
        """Compare rows, some buckets of all tables at a time."""
        num_bytes = sum(path.stat().st_size for files in recorded for path in files)
        num_parts = min(max(1, -(-num_bytes // BYTES_AT_ONCE)), NUM_BUCKETS)
        self.num_compared += len(tables)
        # In as many parts as memory wants, wherever the rows lay.
        anywhere = [table.model_copy(update={"servers": None}) for table in tables]
        found: dict[str, str] = {}
        for part in range(num_parts):
            both = [load_tables(chain, anywhere, ShardMap(num_parts), part) for chain in (recorded, replayed)]
            for table in tables:
                ours, theirs = (_rows_of(table, loaded[table.name]) for loaded in both)
                digests = [b"".join(map(_digest, each.values())) for each in (ours, theirs)]
                if not self._agree(digests):
                    found.setdefault(table.name, _row_difference(ours, theirs))
        self.differences += [Difference(f"rows of {name}", detail) for name, detail in found.items()]

    def _agree(self, digests: Sequence[bytes]) -> bool:
        self.recorded.update(digests[0])
        self.replayed.update(digests[1])
        return digests[0] == digests[1]


def _digest(array: np.ndarray) -> bytes:
    described = f"{array.dtype.str} {array.shape}".encode()
    return hashlib.sha256(described + np.ascontiguousarray(array).tobytes()).digest()


def _difference(recorded: np.ndarray | None, replayed: np.ndarray | None) -> str:
    if recorded is None or replayed is None:
        return f"is missing from the {'snapshot' if recorded is None else 'replay'}"
    if recorded.dtype != replayed.dtype or recorded.shape != replayed.shape:
        return f"{recorded.dtype} {recorded.shape} was {replayed.dtype} {replayed.shape}"
    first, second = (_bits(each) for each in (recorded, replayed))
    places = np.flatnonzero((first != second).any(axis=1))
    place = tuple(map(int, np.unravel_index(places[0], recorded.shape))) if recorded.shape else ()
    values = f"{recorded.reshape(-1)[places[0]]} instead of {replayed.reshape(-1)[places[0]]}"
    return f"{len(places):,} of {recorded.size:,} numbers, the first at {place}: {values}"


def _bits(array: np.ndarray) -> np.ndarray:
    """[size, bytes] of each number: NaN differs from NaN as a number, and 0 is -0."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(len(flat), array.dtype.itemsize)


def _rows_of(config: TableConfig, parts: Iterable[TableRows]) -> dict[str, np.ndarray]:
    """What a table holds, column by column and ordered, whichever shards and increments it came in."""
    table = EmbeddingTable(config.model_copy(update={"disk": None}))
    table.load(parts)
    rows = table.export()
    sighted_K = np.argsort(rows.sighted.ids_K.view(np.uint64))
    evicted_V = np.argsort(rows.evicted.ids_V.view(np.uint64))
    return {
        "id": rows.ids_M,
        "weights": rows.weights_MD,
        "state": rows.state_MS,
        "step": rows.steps_M,
        "count": rows.counts_M,
        "sighted id": rows.sighted.ids_K[sighted_K],
        "sighted step": rows.sighted.steps_K[sighted_K],
        "sighted count": rows.sighted.counts_K[sighted_K],
        "evicted id": rows.evicted.ids_V[evicted_V],
        "evicted step": rows.evicted.steps_V[evicted_V],
    }


def _row_difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> str:
    only = np.setxor1d(ours["id"], theirs["id"])
    if len(only):
        where = "the snapshot" if only[0] in ours["id"] else "the replay"
        return f"{len(only):,} rows are on one side alone, id {only[0]} in {where}"
    for column in ("weights", "state", "step", "count"):
        mine, other = ours[column], theirs[column]
        if not mine.size:
            continue
        wrong_M = (_bits(mine) != _bits(other)).any(axis=1).reshape(len(mine), -1).any(axis=1)
        if wrong_M.any():
            first = int(np.flatnonzero(wrong_M)[0])
            number = f"{int(wrong_M.sum()):,} of {len(mine):,} rows"
            return f"{column} of {number}, the first of id {ours['id'][first]}"
    return "ids that wait for admission, or were evicted"

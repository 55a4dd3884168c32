"""From snapshots of a run to versions of its model: what serving reads of them, and nothing else.

snapshot ─► rows (all, or what has changed since the version before) ─┐
            dense weights, as often as is wanted ─────────────────────┼─► bundles ─► manifest ─► pointer
run ──────► settings, columns ──────────────────────────────────────┤
            catalog, semantic IDs, or those of a later data set ────────┘
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.base.row_codec import NarrowWire, Wire, decode, encode_rows
from rayrec.embeddings.snapshot.layered_tables import (
    LayeredTable,
    LayeredTables,
    reading_config,
    reading_rows,
)
from rayrec.embeddings.snapshot.snapshot import load_changes, load_tables, write_table
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import TableRows
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import COLUMNS_FILE, RunFolder
from rayrec.pipelines.runs.snapshots import WEIGHTS, Snapshot, SnapshotRows
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.versions.gate import (
    GateError,
    check_answers,
    check_catalog,
    check_weights,
    finite_rows,
    overlap,
    probe,
)
from rayrec.pipelines.versions.loading import load_on
from rayrec.pipelines.versions.manifest import SETTINGS, Bundle, ModelVersion, Segment, state_values
from rayrec.pipelines.versions.run_catalogs import CatalogsOfRun
from rayrec.pipelines.versions.store import PublishedMeanwhileError, VersionStore
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError, UnavailableError

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""To publish beside a run that publishes, too."""
MOST_PROBED_BYTES = 256 * 1024 * 1024
"""Of a model that is loaded to be asked at publication: a run's driver has no room for a larger one, and
publishes every few seconds. A larger one is asked by the services, before they answer with it."""


class Publisher:
    """Publishes one run's model to one store. Not thread-safe."""

    def __init__(
        self,
        run: RunFolder,
        store: VersionStore,
        dense_every_s: float = 0.0,
        clock: Callable[[], float] = time.time,
        min_overlap: float = 0.0,
        other_catalog: bool = False,
        rows: Wire = "float32",
        data: str | Path | None = None,
    ) -> None:
        """
        Args:
            dense_every_s: versions that come sooner after new dense weights have these, and new rows.
            min_overlap: share of the items of probe users that the version before gave them, at least.
            other_catalog: whether the catalog may be of something else than the version's before.
            rows: what rows of tables are rounded to.
            data: whose catalog versions get, see `TrainedModel.load`; None: as `CatalogsOfRun` says.

        Raises:
            InputError: the run's model is none that recommends, its data set is not there, its rows cannot be
                rounded so, or the store holds something else.
            OSError: the place does not answer.
        """
        self._run, self._store, self._dense_every_s, self._clock = run, store, dense_every_s, clock
        self._min_overlap, self._other_catalog, self._rows = min_overlap, other_catalog, rows
        store.check_place()
        config = run.config
        if (reason := config.why_rows_stay(rows)) is not None:
            raise InputError(f"{run.path}: its rows cannot be published as {rows}: {reason}")
        # Asked of a few users, on whatever machine publishes.
        asked = config.for_inference().model_copy(update={"device": HOST.kind})
        if data is not None:
            asked = asked.with_data(data)
        assembly = assemble(asked, checksums=False, columns=run.columns)
        if not isinstance(assembly.task, NextItemTask):
            raise InputError(
                f"{run.path}: {config.model.name!r} ranks what is shown to it; versions are of recommenders"
            )
        if assembly.task.model.event_neighbors is not None and config.data.graph is None:
            raise InputError(
                f"{run.path}: {config.model.name!r} finds neighbors among the training events of its data "
                "set, which versions do not have; train it with data.graph, a folder that services can read "
                "and `rayrec data graph` wrote"
            )
        self._config, self._tables = config, assembly.tables
        self._catalogs = CatalogsOfRun(store, run, assembly, is_told=data is not None)
        self._found_whole: set[str] = set()
        """Names of bundles."""
        self._definition: Bundle | None = None
        self._own_weights: Bundle | None = None
        """Those that were sent last."""

    def publish(self, snapshot: Snapshot) -> ModelVersion:
        """Publish a snapshot of the run; it serves from now on, unless an older version is held.

        Raises:
            GateError: it is not fit to serve; the version before serves on.
            InputError: the run does not know the items of the catalog, or somebody else publishes here.
            OSError: the place does not answer; what was published before is whole.
        """
        before, number = self._before()
        where = f"{self._run.path}: {snapshot.path.name} is not published"
        check_weights(snapshot.weights, where)
        catalog = self._catalogs.next(snapshot.state, str(snapshot.path), before)
        files = [snapshot.path / WEIGHTS, *(path for paths in snapshot.sparse_chain for path in paths)]
        num_bytes = sum(path.stat().st_size for path in files)
        model = partial(self._as_served, catalog.assembly, snapshot)
        answers = self._answers(model, num_bytes, before, where)
        self._check_catalog(catalog.bundles.catalog, before, where)
        if self._definition is None or before is None or before.definition != self._definition:
            self._definition = self._put_definition()
        now = self._clock()
        version = ModelVersion(
            number=number,
            published_at=now,
            run=self._run.name,
            device=self._config.device,
            state=state_values(snapshot.state, self._run.state.get("id")),
            definition=self._definition,
            **self._weights(snapshot, before, now),
            segments=self._segments(snapshot, before),
            **vars(catalog.bundles),
            **answers,
        )
        self._store.add(version)
        return version

    def publish_catalog(self) -> ModelVersion | None:
        """Publish a catalog beside the weights and rows that serve; they are not sent again.

        Returns:
            The version; None where no version of this run serves.

        Raises:
            As `publish`; or what serves is damaged.
        """
        for attempts_left in reversed(range(ATTEMPTS)):
            before, number = self._before()
            if self._store.current() is None:
                return None
            serves = self._store.serving()
            if not serves.is_of(self._run):
                return None
            where = f"{self._run.path}: the catalog is not published"
            if not self._store.is_whole(serves.definition):
                raise InputError(f"{where}: {_damaged(serves)}")
            of_version = f"{self._store.url}: version {serves.number}"
            catalog = self._catalogs.next(serves.run_state, of_version, before)
            values = {"number": number, "published_at": self._clock(), **vars(catalog.bundles)}
            version = serves.model_copy(update=values)
            num_bytes = version.weights.num_bytes + version.row_bytes
            model = partial(self._as_published, version, catalog.assembly, where)
            answers = self._answers(model, num_bytes, before, where)
            self._check_catalog(version.catalog, before, where)
            version = version.model_copy(update=answers)
            try:
                self._store.add(version)
            except PublishedMeanwhileError:  # the run itself publishes, too
                if not attempts_left:
                    raise
            else:
                return version
        raise AssertionError("the last attempt returns or raises")

    def _before(self) -> tuple[ModelVersion | None, int]:
        """The newest version, if it can be read, and the number of the next."""
        numbers = self._store.numbers()
        if not numbers:
            return None, 1
        try:
            return self._store.version(numbers[-1]), numbers[-1] + 1
        except InputError as error:
            logger.warning("the version before is not compared, and all of this one is published: %s", error)
            return None, numbers[-1] + 1

    def _answers(
        self, model: Callable[[], TrainedModel], num_bytes: int, before: ModelVersion | None, where: str
    ) -> dict[str, Any]:
        """Fields of the version that say what a few users get: those that the version before was asked for,
        if they are known; nobody's of a model that is too large to be asked here.

        Raises:
            GateError: they get nothing sane, or other items than the version before gave them.
        """
        if num_bytes > MOST_PROBED_BYTES:
            return {"probes": (), "overlap": None}
        users = [] if before is None else [each.user for each in before.probes]
        try:
            recommender = Recommender(model())
            probed = probe(recommender, users) if users else None
            if probed is None or 2 * len(probed.users) < len(users):
                probed = probe(recommender)
        except UnavailableError as error:  # of an event store that an operation reads; serving asks again
            logger.warning("%s is published without a look at its answers: %s", self._run.path, error)
            return {"probes": (), "overlap": None}
        check_answers(probed, where)
        shared = None if before is None else overlap(probed.kept, before.probes)
        if shared is not None and shared < self._min_overlap:
            raise GateError(
                f"{where}: of the items of {len(probed.users)} users, {shared:.0%} are those of the version "
                f"before, and min_overlap wants {self._min_overlap:.0%}"
            )
        return {"probes": probed.kept, "overlap": shared}

    def _as_published(self, version: ModelVersion, assembly: Assembly, where: str) -> TrainedModel:
        try:
            return load_on(self._store, version, assembly).model
        except GateError:
            raise
        except InputError as error:
            raise InputError(f"{where}: {_damaged(version)}: {error}") from error

    def _as_served(self, assembly: Assembly, snapshot: Snapshot) -> TrainedModel:
        """The model with the rows that services will have."""
        wire = self._rows
        if wire == "float32":
            return TrainedModel.of(self._run.name, assembly, snapshot)
        rows = self._everything(snapshot.sparse_chain)
        tables = {
            table.name: LayeredTable.of(
                reading_config(table).model_copy(update={"disk": None}),
                rounded_rows(wire, reading_rows(rows[table.name])),
            )
            for table in self._tables
        }
        model = TrainedModel.of(self._run.name, assembly, snapshot, with_rows=False)
        return replace(model, tables=LayeredTables(tables, snapshot.committed_step))

    def _check_catalog(self, catalog: Bundle, before: ModelVersion | None, where: str) -> None:
        if before is None or before.catalog.name == catalog.name or self._other_catalog:
            return
        try:
            folders = self._store.fetch(catalog), self._store.fetch(before.catalog)
        except InputError as error:  # publishing again is how a damaged version is mended
            logger.warning("the catalog of the version before is damaged, and not compared: %s", error)
            return
        check_catalog(*folders, where)

    def _weights(self, snapshot: Snapshot, before: ModelVersion | None, now: float) -> dict[str, Any]:
        """Fields of the version that say which dense weights it has."""
        goes_on = before is not None and self._goes_on(snapshot, before)
        # A clock that was put back must not keep weights back.
        if before is not None and goes_on and 0 <= now - before.weights_at < self._dense_every_s:
            return {name: getattr(before, name) for name in ("weights", "weights_step", "weights_at")}
        self._own_weights = self._store.put("weights", [snapshot.path / WEIGHTS])
        return {
            "weights": self._own_weights,
            "weights_step": snapshot.committed_step,
            "weights_at": now,
        }

    def _goes_on(self, snapshot: Snapshot, before: ModelVersion) -> bool:
        """Whether the run was at that version's weights before it came to this snapshot. Only those that were
        sent here are known to be its own: another run may have its name."""
        return before.weights == self._own_weights and before.weights_step <= snapshot.committed_step

    def _segments(self, snapshot: Snapshot, before: ModelVersion | None) -> tuple[Segment, ...]:
        """One for each snapshot of the chain; those that the version before has are not written again."""
        if not self._tables:
            return ()
        segments: list[Segment] = []
        num_done = 0
        fingerprints = [rows.fingerprint for rows in snapshot.chain]
        for place, segment in enumerate(() if before is None else before.segments):
            if segment.rows != self._rows or not self._is_whole(segment):
                break
            if segment.snapshot in fingerprints:
                assert before is not None
                segments = list(before.segments[: place + 1])
                num_done = fingerprints.index(segment.snapshot) + 1
        for number in range(num_done, len(snapshot.chain)):
            rows = snapshot.chain[number]
            changes = None
            if segments:
                changes = load_changes(rows.files, self._tables, segments[-1].step)
            if changes is not None:
                segments.append(self._segment(rows, changes, segments[-1].step))
            else:
                chain = snapshot.sparse_chain[: number + 1]
                segments = [self._segment(rows, self._everything(chain), None)]
        return tuple(segments)

    def _is_whole(self, segment: Segment) -> bool:
        """Whether rows that are not written again are as they were published; each is read once."""
        if segment.bundle.name in self._found_whole:
            return True
        if not self._store.is_whole(segment.bundle):
            logger.warning(
                "%s: rows of step %d are damaged, and published again", self._store.url, segment.step
            )
            return False
        self._found_whole.add(segment.bundle.name)
        return True

    def _everything(self, chain: Sequence[Sequence[Path]]) -> Mapping[str, Iterable[TableRows]]:
        """All rows, none of them as a change."""
        loaded = load_tables(chain, self._tables, ShardMap(1), shard=0)
        if len(chain) == 1:
            return loaded
        # A shard wrote all of its rows into an increment: what holds of the others is put together here.
        merged = {table.name: EmbeddingTable(reading_config(table)) for table in self._tables}
        for name, table in merged.items():
            table.load(reading_rows(loaded[name]))
        return {name: table.export_parts() for name, table in merged.items()}

    def _segment(
        self, source: SnapshotRows, rows: Mapping[str, Iterable[TableRows]], since: int | None
    ) -> Segment:
        with tempfile.TemporaryDirectory(prefix="rayrec-publish-") as folder:
            paths = []
            for table in self._tables:
                where = (
                    f"{self._run.path}: the snapshot after step {source.step} is not published: {table.name}"
                )
                parts = finite_rows(reading_rows(rows[table.name]), where)
                config = reading_config(table)
                written = write_table(Path(folder), config, ShardMap(1), 0, source.step, parts, self._rows)
                paths += [Path(folder) / file.name for file in written]
            bundle = self._store.put("rows", paths)
            self._found_whole.add(bundle.name)
        return Segment(
            bundle=bundle, step=source.step, since=since, snapshot=source.fingerprint, rows=self._rows
        )

    def _put_definition(self) -> Bundle:
        names = [SETTINGS, *([COLUMNS_FILE] if (self._run.path / COLUMNS_FILE).exists() else [])]
        return self._store.put("run", [self._run.path / name for name in names])


def _damaged(version: ModelVersion) -> str:
    return (
        f"the version after {version.step + 1:,} steps, which serves, is damaged; publish a snapshot with it "
        "(--snapshot best)"
    )


def rounded_rows(wire: NarrowWire, parts: Iterable[TableRows]) -> Iterator[TableRows]:
    """Rows as they are read where they were written so."""
    for part in parts:
        yield replace(part, weights_MD=decode(encode_rows(wire, part.weights_MD)))

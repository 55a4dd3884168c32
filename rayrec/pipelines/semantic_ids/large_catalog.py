"""Tokenization of a catalog that no process holds: tasks, with files between them.

    training files ─ pieces ─► pairs ──► counts ──► information ─► passes ─► vectors ─┐
                                       of items                                       ├─► codes ─► registry
    items file ─ parts ──────► vectors of texts, and of sources of other packages ────┘

`rayrec.models.tokenizers.out_of_core` has what tasks compute; here is what they read of the data set. A
result does not change with the number of processes or with what a task takes; what was done before a kill is
gone on with (`WorkFolder`).

Axes: I items in catalog order, N events, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.models.tokenizers.out_of_core.catalog import Tokenized, TokenizerSettings, tokenize_blocks
from rayrec.models.tokenizers.out_of_core.components import interaction_rows
from rayrec.models.tokenizers.out_of_core.neighbors import (
    MOST_ITEMS,
    NeighborFiles,
    bounds_of_parts,
    gather_totals,
    merge_part,
    spill_pairs,
    write_information,
)
from rayrec.models.tokenizers.out_of_core.preparation import Sources
from rayrec.models.tokenizers.out_of_core.row_files import (
    Blocks,
    RowFiles,
    mapped,
    one_thread,
    write_array,
)
from rayrec.models.tokenizers.vector_sources import (
    INTERACTIONS,
    InteractionVectors,
    ItemData,
    ItemVectorSource,
    vector_source,
)
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import mix64
from rayrec.platform.tasks import RunTasks, Task
from rayrec.platform.work_folder import Work, WorkFolder
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import ITEMS_FILE

FORMAT = 2
"""Of work folders: one of another version is not gone on with."""
TOKENIZATION = Work("tokenizing", "tokenization", "makes these semantic IDs", "tokenize")

StageProgress = Callable[[str, int, int], None]
"""Called with (stage, tasks done, tasks in all)."""


@dataclass(frozen=True)
class CatalogSizes:
    """What is held at once."""

    block_rows: int = 65_536
    """Items whose sums are taken at once. As of `part_rows`, another number gives other roundings."""
    part_rows: int = 4_096
    """Items whose vectors a source makes at once, in one task."""
    blocks_per_task: int = 2
    piece_events: int = 1_000_000
    """Training events whose pairs one task finds, about; some 500 bytes each."""
    entries_of_part: int = 4_000_000
    """Pairs of events that one task adds up, on average, at most; some 100 bytes each."""
    parts_per_task: int = 8
    """Parts of the matrix that one task multiplies, one after the other."""


def tokenize_large(
    dataset: Dataset,
    out: Path,
    settings: TokenizerSettings,
    source_settings: Mapping[str, Mapping[str, Any]],
    run_tasks: RunTasks,
    progress: StageProgress,
    resume: bool = False,
    spill: Path | None = None,
    sizes: CatalogSizes | None = None,
    keep: Callable[[Tokenized], None] = lambda tokenized: None,
) -> Tokenized:
    """Fit a tokenizer on the items of a data set and make their registry; nothing is written to `out`.

    Args:
        out: where the registry will lie; the folder of what is done lies beside it.
        source_settings: by name of a source of item vectors, in their order side by side.
        run_tasks: where tasks run; all of them read the data set and write to the folder.
        resume: go on with what an interrupted tokenization has done, if there is one.
        spill: another folder for the files between the passes.
        keep: writes the result; what was done is deleted after it.

    Raises:
        InputError: vectors cannot be made of this data or not be clustered, or collisions not be resolved.
        NoRoomError: a disk is full.
    """
    sizes = sizes or CatalogSizes()
    plan = {
        "format": FORMAT,
        **asdict(settings),
        "sources": {name: dict(values) for name, values in source_settings.items()},
        **asdict(sizes),
        "files": [[str(dataset.root), f"fingerprint {dataset.fingerprint}"]],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with WorkFolder.open(out, spill, plan, resume, TOKENIZATION) as work:
        try:
            tokenization = _Tokenization(dataset, settings, source_settings, run_tasks, progress, work, sizes)
            tokenized = tokenization.run()
        except InputError:
            raise
        except ValueError as error:  # in here, so that the folder is not kept for what would come again
            raise InputError(f"{dataset.root}: {error} (--vectors, --codebook-size, --levels)") from error
        keep(tokenized)
    return tokenized


class _Tokenization:
    """The stages, one after the other."""

    def __init__(
        self,
        dataset: Dataset,
        settings: TokenizerSettings,
        source_settings: Mapping[str, Mapping[str, Any]],
        run_tasks: RunTasks,
        progress: StageProgress,
        work: WorkFolder,
        sizes: CatalogSizes,
    ) -> None:
        self._dataset = dataset
        self._settings = settings
        self._source_settings = source_settings
        self._run_tasks = run_tasks
        self._progress = progress
        self._work = work
        self._sizes = sizes
        self._num_items = dataset.manifest.files[ITEMS_FILE].rows
        self._blocks = Blocks(self._num_items, sizes.block_rows, sizes.blocks_per_task)
        if self._num_items > MOST_ITEMS:
            raise InputError(f"{dataset.root}: {self._num_items:,} items; at most {MOST_ITEMS:,} get codes")

    def run(self) -> Tokenized:
        ids_file, popularity_I = self._write_ids()
        files = {name: self._vectors(name) for name in self._source_settings}
        sources = Sources(files, ids_file, self._blocks)
        return tokenize_blocks(
            sources, self._settings, self._dataset.fingerprint, popularity_I, self._run_stage
        )

    def _run_stage(self, stage: str, task: Task, shared: Any, arguments: Sequence[Any]) -> list[Any]:
        done = 0

        def count(index: int, result: Any) -> None:
            nonlocal done
            done += 1
            self._progress(stage, done, len(arguments))

        return self._work.run(stage, self._run_tasks, task, shared, arguments, count)

    def _write_ids(self) -> tuple[Path, np.ndarray]:
        """The file of ids, and training events of each item. Ids by position, and their hashes, which
        ascend."""
        table = self._dataset.read(ITEMS_FILE, ["item_id", "train_count"])
        ids_I = table["item_id"].to_numpy()
        ids_file = self._work.spill / "ids.i8"
        write_array(ids_file, ids_I)
        hash_I = mix64(ids_I)
        if not bool((hash_I[1:] > hash_I[:-1]).all()):
            raise InputError(
                f"{self._dataset.root / ITEMS_FILE}: items are not in the order of their ids' hash; prepare "
                "the data set again"
            )
        write_array(self._work.spill / "hashes.u8", hash_I)
        return ids_file, table["train_count"].to_numpy()

    def _vectors(self, name: str) -> RowFiles:
        source = vector_source(name, self._source_settings[name])
        if isinstance(source, InteractionVectors):
            return self._interactions(name, source)
        if not source.of_new_items:
            raise InputError(
                f"{self._dataset.root}: vectors from {name} are made by one process that holds all items, "
                f"and there are {self._num_items:,}; take {INTERACTIONS} or text, or tokenize in memory "
                "(--large-catalog)"
            )
        parts = range(-(-self._num_items // self._sizes.part_rows))
        job = _PartsJob(
            self._dataset.root, source, self._work.spill, name, self._num_items, self._sizes.part_rows
        )
        (dim, *others) = set(self._run_stage(f"vectors-{name}", _write_part, job, parts))
        if others:
            raise InputError(f"{name}: its vectors have different widths, {sorted([dim, *others])}")
        return job.files(dim)

    def _interactions(self, name: str, source: InteractionVectors) -> RowFiles:
        pieces, num_events = _pieces(self._dataset, self._sizes.piece_events)
        bounds = bounds_of_parts(self._num_items, 2 * source.window * num_events, self._sizes.entries_of_part)
        files = NeighborFiles(self._work.spill, self._num_items, source.window, bounds)
        starts = self._run_stage("pairs", _spill_piece, _PairsJob(self._dataset.root, files), pieces)
        of_parts = [
            [(of_piece[part], of_piece[part + 1]) for of_piece in starts] for part in range(files.num_parts)
        ]
        entries = self._run_stage("counts", _merge_part, files, list(enumerate(of_parts)))
        if not sum(entries):
            raise InputError(
                f"{self._dataset.root}: training sequences with {num_events} events have no two different "
                "items near each other; interactions cannot tell these items apart; use --vectors text"
            )
        self._work.remove_spilled("pairs-*.entries")
        (context_sum,) = self._run_stage("totals", _gather_totals, files, [None])
        information = (files, context_sum)
        self._run_stage("information", _write_information, information, range(files.num_parts))
        self._work.remove_spilled("counts-*.safetensors")
        try:
            vectors = interaction_rows(
                files,
                self._blocks,
                source.dim,
                source.seed,
                name,
                self._run_stage,
                self._sizes.parts_per_task,
            )
        except ValueError as error:
            raise InputError(f"{self._dataset.root}: {error}; use --vectors text") from error
        self._work.remove_spilled("information-*.safetensors")
        return vectors


@dataclass(frozen=True)
class _PairsJob:
    root: Path
    files: NeighborFiles


@dataclass(frozen=True)
class _Piece:
    """Some row groups of a training file."""

    number: int
    file: str
    groups: range


def _pieces(dataset: Dataset, piece_events: int) -> tuple[list[_Piece], int]:
    """The training files in pieces of about so many events, and their events in all."""
    pieces: list[_Piece] = []
    total = 0
    for name in dataset.train_files:
        with pq.ParquetFile(dataset.root / name) as file:
            metadata = file.metadata
            column = next(
                number
                for number in range(metadata.num_columns)
                if metadata.schema.column(number).path.startswith("item_ids.")
            )
            first, events = 0, 0
            for group in range(metadata.num_row_groups):
                events += metadata.row_group(group).column(column).num_values
                if events >= piece_events or group == metadata.num_row_groups - 1:
                    pieces.append(_Piece(len(pieces), name, range(first, group + 1)))
                    total, first, events = total + events, group + 1, 0
    return pieces, total


def _spill_piece(job: _PairsJob, piece: _Piece) -> list[int]:
    with pq.ParquetFile(job.root / piece.file) as file:
        table = file.read_row_groups(list(piece.groups), columns=["item_ids"], use_threads=False)
    ids_N, offsets_B1 = list_values(table["item_ids"])
    hash_I = mapped(job.files.folder / "hashes.u8", "<u8")
    positions_N = np.searchsorted(hash_I, mix64(ids_N))
    return spill_pairs(job.files, piece.number, positions_N, offsets_B1)


def _merge_part(files: NeighborFiles, what: tuple[int, list[tuple[int, int]]]) -> int:
    return merge_part(files, *what)


def _gather_totals(files: NeighborFiles, _: None) -> float:
    return gather_totals(files)


def _write_information(shared: tuple[NeighborFiles, float], part: int) -> int:
    files, context_sum = shared
    return write_information(files, part, context_sum)


@dataclass(frozen=True)
class _PartsJob:
    """Vectors that a source makes of each item alone."""

    root: Path
    source: ItemVectorSource
    folder: Path
    name: str
    num_items: int
    part_rows: int

    def files(self, dim: int) -> RowFiles:
        return RowFiles(self.folder, self.name, self.num_items, dim, self.part_rows)


def _write_part(job: _PartsJob, part: int) -> int:
    """Make the vectors of some items, as of items that are new; their width."""
    start, stop = part * job.part_rows, min((part + 1) * job.part_rows, job.num_items)
    table = item_rows(job.root / ITEMS_FILE, start, stop, ["item_key", "text"])
    items = ItemData(str(job.root), table["item_key"].to_pylist(), table["text"].to_pylist(), None)
    with one_thread():
        vectors_RD = job.source.vectors(items)
    job.files(vectors_RD.shape[1]).write(part, np.asarray(vectors_RD, dtype=np.float32))
    return vectors_RD.shape[1]


def item_rows(path: Path, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
    """Some rows of a Parquet file, of which no more than a batch is in memory besides."""
    found: list[pa.Table] = []
    with pq.ParquetFile(path) as file:
        first = 0
        for group in range(file.metadata.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            if end > start and first < stop:
                at = first
                for batch in file.iter_batches(65_536, [group], list(columns), use_threads=False):
                    if at + len(batch) > start and at < stop:
                        low = max(start - at, 0)
                        found.append(
                            pa.Table.from_batches([batch]).slice(low, min(stop - at, len(batch)) - low)
                        )
                    at += len(batch)
                    if at >= stop:
                        break
            first = end
    return pa.concat_tables(found)

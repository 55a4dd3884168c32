"""From a run's settings to the features of its rows.

Imports no torch: feature workers make their features with this, and start within a second.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt

from rayrec.models.generative.item_language_config import ItemLanguageConfig
from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.impression_rows import impression_features_of, impression_rows
from rayrec.pipelines.tasks.item_prompts import prompt_features
from rayrec.pipelines.tasks.text_rows import text_features_of, text_rows
from rayrec.pipelines.tasks.training_rows import RowSource, compiled
from rayrec.pipelines.tasks.wanted_columns import WantedColumn
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import LABELS
from rayrec.samples.base.batches import TrainingFeatures
from rayrec.samples.base.event_labels import LABEL_COLUMNS, are_event_labels
from rayrec.samples.base.event_times import TIMES, are_event_times
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.neighbors import NeighborFinder
from rayrec.samples.features.prefix_paths import PrefixPaths
from rayrec.samples.features.row_features import HistoryColumns, RowFeatures
from rayrec.samples.graph.saved import SavedGraph
from rayrec.samples.graph.sources import check_data, graph_of_dataset
from rayrec.samples.graph.temporal_graph import TemporalGraph
from rayrec.samples.operations.join_history import JoinHistory
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.reading.read_plan import ReadPlan
from rayrec.samples.stores.manifest import ITEMS

SEMANTIC_IDS_FOLDER = "semantic_ids"
logger = logging.getLogger(__name__)


def features_of(config: RunConfig, columns: pa.Schema) -> TrainingFeatures:
    """For the process of a feature worker, whenever it starts: the catalog does not travel.

    Nor are files of training rows looked at: one that vanishes is the readers' to report.
    """
    model = config.model
    if model.kind == "impressions":
        return impression_features_of(config, model, columns)
    if model.kind == "language":
        return text_features_of(config, model, columns)
    dataset = Dataset.open(config.data.path, checksums=False)
    sequences = sequence_features(config, model, dataset, registry_of(config, model, dataset))
    return row_features(
        config, model, dataset, sequences, compiled(config, history_columns(config, model), columns)
    )


def _is_list_of_integers(dtype: pa.DataType) -> bool:
    return (pt.is_list(dtype) or pt.is_large_list(dtype)) and pt.is_integer(dtype.value_type)


def history_columns(config: RunConfig, model: SequenceModelConfig) -> Mapping[str, WantedColumn]:
    """Whose a row is, that user's items, oldest first, and their times and labels where they are needed."""
    wanted = {
        "user_id": WantedColumn(pt.is_integer, "integers"),
        "item_ids": WantedColumn(_is_list_of_integers, "lists of integers"),
    }
    if model.needs_times or config.data.redraw_ties or config.goes_by_event_times:
        expected = "lists of seconds, or of dates and times"
        reader = "data.redraw_ties goes by" if config.data.redraw_ties else "eviction.ttl_hours goes by"
        if model.needs_times:
            reader = "the model reads"
        wanted[TIMES] = WantedColumn(are_event_times, expected, f"{reader} when events were")
    for label in model.needs_labels:
        reason = f"the model reads the {label} of events"
        wanted[LABEL_COLUMNS[label]] = WantedColumn(are_event_labels, "lists of codes", reason)
    return wanted


@dataclass(frozen=True)
class HistoryRows:
    """The rows of a prepared data set: one user's history each."""

    config: RunConfig
    model: SequenceModelConfig
    dataset: Dataset

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def wanted_columns(self) -> Mapping[str, WantedColumn]:
        return history_columns(self.config, self.model)

    def own_rows(self) -> ReadPlan:
        config = self.config
        return ReadPlan.of(self.dataset, config.training.batch_size, config.seed, config.data.window_rows)


def row_source(config: RunConfig) -> RowSource:
    """The training rows of a config.

    Raises:
        InputError: there is no such data set.
    """
    if config.model.kind == "impressions":
        return impression_rows(config, config.model)
    if config.model.kind == "language":
        return text_rows(config)
    return HistoryRows(config, config.model, Dataset.open(config.data.path, checksums=False))


def row_features(
    config: RunConfig,
    model: SequenceModelConfig,
    dataset: Dataset,
    sequences: SequenceFeatures,
    program: FeatureProgram,
) -> RowFeatures:
    operates = not program.is_empty
    histories = HistoryColumns(
        reads_times=model.needs_times,
        reads_labels=model.input_labels,
        stores_times=operates and dataset.has_times(),
        stores_labels=tuple(label for label in LABELS if operates and dataset.has_label(label)),
    )
    return RowFeatures(
        sequences,
        program,
        config.seed,
        config.data.cache is not None,
        histories,
        config.data.redraw_ties,
        config.goes_by_event_times,
    )


def compare_stores(program: FeatureProgram, dataset: Dataset) -> None:
    """Warn of event stores whose ids are of another kind than those of the data set.

    They are not refused: a log may have the data set's 64-bit ids in place of its own. Where it has not, no
    item is known, and training ends with an error as soon as it has found nothing to learn from.
    """
    for operation in program.operations:
        if isinstance(operation, JoinHistory) and ITEMS in operation.config.outputs.values():
            store, data = operation.manifest.id_kinds, dataset.manifest.id_kinds
            if store != data:
                logger.warning(
                    "%s: ids of this event store are %s, those of the data set %s %s: ids are strings as "
                    "soon as one id of the log, or of a table of items or users, is no integer; if both are "
                    "of one log, make all of its ids texts and build both again",
                    operation.config.store,
                    store,
                    dataset.root,
                    data,
                )


def sequence_features(
    config: RunConfig, model: SequenceModelConfig, dataset: Dataset, registry: SemanticIdRegistry | None
) -> SequenceFeatures:
    if isinstance(model, ItemLanguageConfig):
        assert registry is not None, "it generates semantic IDs"
        return prompt_features(config, model, dataset, registry)
    return SequenceFeatures(
        dataset.items.ids_I,
        max_length=model.history_length,
        window_step=model.windows_begin_at,
        chunk_events=0 if model.summarized is None else model.summarized.chunk_events,
        max_chunks=0 if model.summarized is None else model.summarized.max_chunks,
        windows=config.windows,
        tables=tuple(model.tables),
        codes_IL=None if registry is None else registry.learned_codes_IL,
        num_negatives=model.negatives.per_batch,
        negatives_per_event=model.negatives.per_event,
        negatives=model.negatives.sampling,
        train_counts_I=dataset.items.train_counts_I,
        neighbors=neighbor_finder(config, model, dataset),
        paths=prefix_paths(config, model, dataset, registry),
        label_sizes={label: len(dataset.manifest.labels[label]) for label in model.needs_labels},
        seed=config.seed,
        num_trainers=config.pipeline.num_trainers,
    )


def prefix_paths(
    config: RunConfig, model: SequenceModelConfig, dataset: Dataset, registry: SemanticIdRegistry | None
) -> PrefixPaths | None:
    """What finds the prefixes that batches read, for a model whose vectors of prefixes are rows of a
    table."""
    if "prefix" not in model.tables:
        return None
    assert registry is not None, "a model of prefixes is one of semantic IDs"
    trained_I = dataset.items.train_counts_I > 0 if trains_on_its_events(config) else None
    return PrefixPaths(registry.learned_codes_IL, model.siblings_per_prefix, trained_I, config.seed)


def trains_on_its_events(config: RunConfig) -> bool:
    """Whether what is trained on are the training events of the data set, and it knows which items have any:
    events of other rows, and those that operations bring, are in no count of it."""
    return config.data.samples is None and not config.data.features


def neighbor_finder(config: RunConfig, model: SequenceModelConfig, dataset: Dataset) -> NeighborFinder | None:
    """What finds the neighbors of events, for a model that reads them.

    Raises:
        InputError: the graph is missing or damaged, lacks edges of the past, or is of another log than the
            data set.
    """
    wanted = model.event_neighbors
    if wanted is None:
        return None
    if config.data.graph is None:
        dataset.train_files  # noqa: B018 - refuses a copy without them, before the first batch
        graph: Callable[[], TemporalGraph] = functools.cache(functools.partial(graph_of_dataset, dataset))
    else:
        saved = SavedGraph(config.data.graph)
        check_data(saved.current(), dataset, config.data.graph)
        graph = saved.current
    return NeighborFinder(graph, wanted.count, wanted.window, wanted.most_users, wanted.most_events)


def registry_of(config: RunConfig, model: SequenceModelConfig, dataset: Dataset) -> SemanticIdRegistry | None:
    """The semantic IDs, where the model generates them.

    Raises:
        InputError: there are none, or those of another data set.
    """
    if not model.needs_semantic_ids:
        return None
    folder, make = registry_folder(config), f"rayrec tokenize {config.data.path}"
    if (begins_with := config.training.init_from) is not None:
        make += f" (with --extend and the IDs of {begins_with}, if that was trained on earlier data)"
    if not folder.is_dir():
        raise InputError(
            f"{folder}: there are no semantic IDs, which the generative model needs; make them with: {make}"
        )
    registry = SemanticIdRegistry.load(folder)
    if registry.dataset_fingerprint != dataset.fingerprint:
        raise InputError(
            f"{folder}: the semantic IDs were made for another data set than {config.data.path} is now; "
            f"make them again with: {make}"
        )
    return registry


def registry_folder(config: RunConfig) -> Path:
    return Path(config.data.semantic_ids or Path(config.data.path) / SEMANTIC_IDS_FOLDER)

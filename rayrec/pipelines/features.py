"""From a run's settings to the features of its rows.

Imports no torch: feature workers make their features with this, and start within a second.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from rayrec.models.config import EncoderDecoderConfig, NextItemConfig, history_length, sparse_tables
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.config import RunConfig
from rayrec.pipelines.training_rows import compiled
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import LABELS
from rayrec.samples.dataset import Dataset
from rayrec.samples.features import SequenceFeatures
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.row_features import HistoryColumns, RowFeatures

SEMANTIC_IDS_FOLDER = "semantic_ids"


def features_of(config: RunConfig, columns: pa.Schema) -> RowFeatures:
    """For the process of a feature worker, whenever it starts: the catalogue does not travel.

    Nor are files of training rows looked at: one that vanishes is the readers' to report.
    """
    dataset = Dataset.open(config.data.path, checksums=False)
    sequences = sequence_features(config, dataset, registry_of(config, dataset))
    return row_features(config, dataset, sequences, compiled(config, columns))


def row_features(
    config: RunConfig, dataset: Dataset, sequences: SequenceFeatures, program: FeatureProgram
) -> RowFeatures:
    model, operates = config.model, not program.is_empty
    histories = HistoryColumns(
        reads_times=model.needs_times,
        reads_labels=model.input_labels,
        stores_times=operates and dataset.has_times(),
        stores_labels=tuple(label for label in LABELS if operates and dataset.has_label(label)),
    )
    return RowFeatures(sequences, program, config.seed, config.data.cache is not None, histories)


def sequence_features(
    config: RunConfig, dataset: Dataset, registry: SemanticIdRegistry | None
) -> SequenceFeatures:
    model = config.model
    return SequenceFeatures(
        dataset.items.ids_I,
        max_length=history_length(model),
        tables=sparse_tables(model),
        codes_IL=None if registry is None else registry.learned_codes_IL,
        num_negatives=num_negatives_of(config),
        negatives_per_event=negatives_per_event_of(config),
        negatives=model.negative_sampling if isinstance(model, NextItemConfig) else "uniform",
        train_counts_I=dataset.items.train_counts_I,
        label_sizes={label: len(dataset.manifest.labels[label]) for label in model.needs_labels},
        seed=config.seed,
        num_trainers=config.pipeline.num_trainers,
    )


def num_negatives_of(config: RunConfig) -> int:
    """Drawn for every batch; 0 where the model needs none."""
    model = config.model
    if isinstance(model, NextItemConfig) and model.loss_or_default == "sampled_softmax":
        return model.num_negatives
    if isinstance(model, EncoderDecoderConfig) and model.retrieval is not None and model.retrieval.q2i_weight:
        return model.retrieval.q2i_negatives
    return 0


def negatives_per_event_of(config: RunConfig) -> int:
    """Drawn for every event to be predicted; 0 where the model needs none."""
    model = config.model
    if isinstance(model, NextItemConfig) and model.loss_or_default == "bce":
        return model.negatives_per_event
    return 0


def registry_of(config: RunConfig, dataset: Dataset) -> SemanticIdRegistry | None:
    """The semantic IDs, where the model generates them.

    Raises:
        InputError: there are none, or those of another data set.
    """
    if isinstance(config.model, NextItemConfig):
        return None
    folder = registry_folder(config)
    if not folder.is_dir():
        raise InputError(
            f"{folder}: there are no semantic IDs, which the generative model needs; "
            f"make them with: rayrec tokenize {config.data.path}"
        )
    registry = SemanticIdRegistry.load(folder)
    if registry.dataset_fingerprint != dataset.fingerprint:
        raise InputError(
            f"{folder}: the semantic IDs were made for another data set than {config.data.path} is now; "
            f"make them again with: rayrec tokenize {config.data.path}"
        )
    return registry


def registry_folder(config: RunConfig) -> Path:
    return Path(config.data.semantic_ids or Path(config.data.path) / SEMANTIC_IDS_FOLDER)

"""The task of recommenders: which item comes next, learned from histories, judged by ranking all items."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.base.meta_device import MetaWeights
from rayrec.models.decoding.trie_file import TRIE_FILE, TrieFile
from rayrec.models.generative.item_language_config import ItemLanguageConfig
from rayrec.models.generative.prefix_decoder_config import PrefixDecoderConfig
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import RankedItems
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.models.sequence.sequence_program import SequenceProgramSpec, build_model
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, summarize, target_places, user_scores
from rayrec.pipelines.tasks.content_items import counted_items, packed, unpacked
from rayrec.pipelines.tasks.features import (
    HistoryRows,
    compare_stores,
    registry_folder,
    registry_of,
    row_features,
    sequence_features,
    trains_on_its_events,
)
from rayrec.pipelines.tasks.instructions import check_labels, evaluation_instruction
from rayrec.pipelines.tasks.item_prompts import item_vocabulary, places_of_items
from rayrec.pipelines.tasks.later_catalog import (
    EarlierItems,
    WeightRows,
    carried_over,
    check_rows_are_known,
    check_same_items,
    check_same_log,
    warn_of_samples,
)
from rayrec.pipelines.tasks.task import GRAPH, Task
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.code_tree import num_levels_within
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import Part
from rayrec.platform.item_bags import ItemBags
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.item_content import content_columns, item_content
from rayrec.samples.dataset.manifest import Entity, IdKind, Split
from rayrec.samples.features.features import SequenceFeatures, code_ids
from rayrec.samples.features.prefix_paths import PrefixPaths
from rayrec.samples.features.row_features import RowFeatures
from rayrec.samples.graph.sources import graph_bytes
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.reading.reader import evaluation_batches

if TYPE_CHECKING:
    from rayrec.pipelines.runs.snapshots import RunState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NextItemTask(Task):
    """A data set of histories, the semantic IDs of its items, and what makes features of its rows."""

    config: RunConfig
    model: SequenceModelConfig
    dataset: Dataset
    registry: SemanticIdRegistry | None
    catalog: Catalog
    sequences: SequenceFeatures
    counted_I: BoolArray
    """[I] the items that what the catalog says of items was counted in."""
    earlier: EarlierItems | None = None
    """Of a run that was trained on an earlier data set, and has no semantic IDs that say so."""

    @classmethod
    def open(cls, config: RunConfig, model: SequenceModelConfig, checksums: bool = True) -> NextItemTask:
        """Open the data set and the semantic IDs and check them against the config.

        Raises:
            InputError: the data set or the semantic IDs are missing, damaged, or of each other's; or the
                model needs times or labels that the data set does not have.
        """
        dataset = Dataset.open(config.data.path, checksums)
        if model.needs_times or config.goes_by_event_times:
            dataset.check_times()
        check_labels(config, model, dataset)
        registry = registry_of(config, model, dataset)
        sequences = sequence_features(config, model, dataset, registry)
        counted_I = counted_items(config, dataset)
        catalog = Catalog(
            num_items=len(dataset.items),
            codes_IL=None if registry is None else registry.codes_IL,
            level_sizes=() if registry is None else registry.learned_level_sizes,
            negative_log_q_I=sequences.negative_log_q_I() if model.negatives.per_batch else None,
            labels=dataset.manifest.labels,
            trie_file=None
            if registry is None
            else TrieFile(registry_folder(config) / TRIE_FILE, registry.version),
            content=_content(model, dataset, counted_I),
            vocabulary=_vocabulary(model, registry),
        )
        return cls(config, model, dataset, registry, catalog, sequences, counted_I)

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def semantic_ids_version(self) -> str | None:
        return None if self.registry is None else self.registry.version

    @property
    def labels(self) -> dict[str, list[str]] | None:
        names = self.dataset.manifest.labels
        return {label: list(names[label]) for label in self.model.named_labels} or None

    @property
    def content_items(self) -> str | None:
        return None if self.model.item_content is None else packed(self.counted_I)

    @property
    def row_source(self) -> HistoryRows:
        return HistoryRows(self.config, self.model, self.dataset)

    def check_split(self, split: Split) -> None:
        check_split(self.dataset, split)

    def check_state(self, state: RunState, where: str) -> None:
        """Semantic IDs that extend the snapshot's are those of a catalog that has grown, with its data set:
        what was learned holds for both. So it does where the task was `grown_from` that data set.
        """
        registry = self.registry
        _check_labels(state.labels, self.labels, self.dataset, where, "train from the start")
        if registry is not None and registry.extends(
            state.semantic_ids_version or "", state.dataset_fingerprint
        ):
            return
        if self.earlier is not None and self.earlier.dataset_fingerprint == state.dataset_fingerprint:
            return
        if state.dataset_fingerprint != self.fingerprint:
            if registry is not None:
                way_out = "or extend its semantic IDs for a later one (rayrec tokenize --extend)"
            elif self.model.item_content is not None:
                way_out = "or keep that, and give a later one beside it (--data)"
            else:
                way_out = "or train on this one: the model knows items by their ids alone"
            raise InputError(
                f"{where}: was trained on another data set than {self.config.data.path} holds now; give the "
                f"one that it was trained on, {way_out}"
            )
        if registry is not None:
            registry.check_matches(state.semantic_ids_version or "none", where)

    def check_goes_on_from(self, earlier: Task, where: str) -> None:
        assert isinstance(earlier, NextItemTask), "its model is of the same kind"
        begin = "or begin without init_from"
        _check_labels(earlier.labels, self.labels, self.dataset, where, "train from the start")
        check_same_log(earlier.dataset, self.dataset, where, "begin without init_from")
        if self.registry is not None and not self.registry.extends(
            earlier.semantic_ids_version or "", earlier.fingerprint
        ):
            raise InputError(
                f"{where}: was trained with semantic IDs that those of {registry_folder(self.config)} do not "
                f"extend, so that its codes mean something else; extend them (rayrec tokenize "
                f"{self.config.data.path} --extend {registry_folder(earlier.config)} --overwrite), {begin}"
            )
        self._check_reads_the_same_columns(earlier, where, begin)
        check_rows_are_known(earlier._weight_rows, self._weight_rows)

    def reads_items_of(self, state: RunState) -> bool:
        """Of a model that knows items by what is said of them: those that came later have vectors, too."""
        if self.registry is not None or self.model.item_content is None:
            return False
        return state.dataset_fingerprint != self.fingerprint

    def grown_from(self, earlier: Task, state: RunState, where: str) -> Self:
        assert isinstance(earlier, NextItemTask), "its model is the same"
        way_out = "serve the data set that it was trained on, or one that has further items"
        check_same_items(earlier.dataset, self.dataset, where, way_out)
        self._check_reads_the_same_columns(earlier, where, f"or {way_out}")
        ours_I, theirs_I = self.dataset.items.ids_I, earlier.dataset.items.ids_I
        known_I = np.isin(ours_I, theirs_I)
        if num_gone := len(theirs_I) - int(known_I.sum()):
            example = earlier.dataset.items.keys[int((~np.isin(theirs_I, ours_I)).argmax())].as_py()
            raise InputError(
                f"{where}: {self.config.data.path} lacks {num_gone:,} of the items that it was trained on, "
                f"such as {example!r}; prepare it with all of them (--allow cold-items, where they have no "
                f"events any more), or {way_out}"
            )
        assert np.array_equal(ours_I[known_I], theirs_I), "items are in the order of their ids"
        grown = self.reading_items_since(EarlierItems(earlier.fingerprint, known_I), state, where)
        before, now = earlier.learning_on(state).catalog.content, grown.catalog.content
        assert before is not None, "the model reads it"
        assert now is not None, "the model reads it"
        if num_changed := int(before.differ_from(now.some(np.flatnonzero(known_I))).sum()):
            logger.warning(
                "%s: %s of the %s items that it knows have other words or values in %s, which are read; "
                "if these are other items with the same ids, do not use it",
                where,
                f"{num_changed:,}",
                f"{len(theirs_I):,}",
                self.config.data.path,
            )
        return grown

    def reading_items_since(self, earlier: EarlierItems, state: RunState, where: str) -> Self:
        """The same task, for a run that was trained on the earlier items and knows others by their words.

        Args:
            where: the run is, for the log.
        """
        known_I = earlier.known_I
        grown = replace(self, earlier=earlier).learning_on(state)
        assert grown.catalog.content is not None, "the model reads it"
        logger.info(
            "%s: %s of the %s items that came since say nothing that it has learned, and are not recommended",
            where,
            f"{int((~known_I & (np.diff(grown.catalog.content.offsets_I1) == 0)).sum()):,}",
            f"{int((~known_I).sum()):,}",
        )
        return grown

    def _check_reads_the_same_columns(self, earlier: NextItemTask, where: str, way_out: str) -> None:
        if (content := self.model.item_content) is None:
            return
        theirs, ours = (content_columns(task.dataset, content.columns) for task in (earlier, self))
        if theirs != ours:
            raise InputError(
                f"{where}: model.content has read {', '.join(theirs)} of its items, and would read "
                f"{', '.join(ours)} of those of {self.config.data.path}; prepare the same columns, "
                f"{way_out}"
            )

    def check_can_be_judged_on(self, later: Dataset, where: str) -> None:
        """Refuse a later data set whose events do not go on after those of this one; warn where the run may
        know some.

        Args:
            where: what was trained, for messages.

        Raises:
            InputError: it is not of the same log, lacks what the model reads, or nothing says which of its
                events are later.
        """
        way_out = "judge it on a later data set of its own log"
        check_same_log(self.dataset, later, where, way_out)
        check_labels(self.config, self.model, later)
        names: dict[str, list[str]] = {label: list(of) for label, of in later.manifest.labels.items()}
        _check_labels(self.labels, names, later, where, way_out)
        for dataset in (self.dataset, later):
            dataset.check_times()
            if dataset.has_order_alone():
                raise InputError(
                    f"{dataset.root}: its events have an order and no times, so nothing says which are "
                    "later; prepare logs with times"
                )
        warn_of_samples(self.config, where, later.root)

    @cached_property
    def _weight_rows(self) -> WeightRows:
        return WeightRows.of(self.network(), self.dataset.items.ids_I)

    def row_ids(self) -> dict[str, Int64Array]:
        return self._weight_rows.ids or {}

    def weights_from(
        self, weights: dict[str, np.ndarray], rows: Mapping[str, Int64Array]
    ) -> dict[str, np.ndarray]:
        """Items and prefixes keep what was learned of them; those that came since are as in a new network."""
        if not rows:
            return weights
        network = build_model(self.model, self._trained_catalog, self.config.seed)
        return carried_over(weights, rows, network, self.row_ids())

    @property
    def id_kinds(self) -> Mapping[Entity, IdKind]:
        return self.dataset.manifest.id_kinds

    def features(self, program: FeatureProgram) -> RowFeatures:
        compare_stores(program, self.dataset)
        return row_features(self.config, self.model, self.dataset, self.sequences, program)

    def program(self, optimizer: DenseOptimizerSettings) -> SequenceProgramSpec:
        return SequenceProgramSpec(self.model, self._trained_catalog, optimizer)

    @property
    def _trained_catalog(self) -> Catalog:
        """With what is known of it in training alone."""
        if not trains_on_its_events(self.config):
            return self.catalog
        return replace(self.catalog, trained_I=self.dataset.items.train_counts_I > 0)

    @property
    def catalog_ids_I(self) -> Int64Array | None:
        return self.dataset.items.ids_I

    def ids_of(self, table: str) -> Int64Array:
        if table == "item":
            return self.dataset.items.ids_I
        if table == "user":
            ids_U: Int64Array = self.dataset.users["user_id"].to_numpy()
            return ids_U
        if table == "prefix":
            tree = self._paths.tree
            return np.concatenate([tree.prefix_ids(depth + 1) for depth in range(tree.depth)])
        assert table == "code", f"no rule for the ids of table {table!r}"
        assert self.registry is not None
        return np.unique(code_ids(self.registry.learned_codes_IL))

    def most_batch_ids(self, table: str) -> int:
        """As `SequenceFeatures` makes them."""
        model = self.model
        num_trainers = self.config.pipeline.num_trainers
        num_rows = self.config.training.batch_size * self.config.windows
        num_tokens = num_rows * model.history_length
        if self.config.data.samples is None:
            # Each window but a row's only one has a target for each place; there are not more than events.
            events = self.dataset.manifest.counts["train_events"]
            num_tokens = max(min(num_tokens, events), self.config.training.batch_size * model.history_length)
        if num_trainers > 1:
            # Shares are of about equal length, within that of a row; one may have all but a few long rows.
            num_tokens = min(num_tokens, -(-num_tokens // num_trainers) + model.history_length)
        if table == "user":
            return self.config.training.batch_size
        if isinstance(model, ItemLanguageConfig):
            return num_rows * places_of_items(model)
        if table == "code":
            assert self.registry is not None
            return num_tokens * self.registry.num_learned_levels
        if table == "prefix":
            num_items = num_tokens + model.negatives.per_batch
            return num_items * self._paths.tree.depth + self._paths.most_candidates(num_tokens)
        negatives, neighbors = model.negatives, model.event_neighbors
        num_ids = num_tokens if neighbors is None else num_tokens * (1 + neighbors.count)
        if negatives.per_batch or negatives.per_event:  # targets and negatives are looked up, too
            num_ids += num_tokens + negatives.per_batch + num_tokens * negatives.per_event
        return num_ids

    def network(self, catalog: Catalog | None = None) -> SequenceModel:
        """The network without values of its weights, as far as it can be built so.

        Args:
            catalog: None: that of the data set, as a new run learns it.
        """
        # An item matrix, vectors of prefixes or a language model may be what does not fit into memory. The
        # items' codes, from which other sizes follow, are there, and the tree of them while it is built.
        with MetaWeights():
            return build_model(self.model, catalog or self.catalog, self.config.seed)

    def notes(self) -> list[str]:
        notes = self.model.notes()
        if self.model.needs_times and self.dataset.has_order_alone():
            notes.append(
                "the model reads times, and the data have an order of events alone, whose places it reads"
            )
        return notes

    @property
    def worker_holds(self) -> dict[str, int]:
        held = {}
        if self.model.event_neighbors is not None and self.config.data.graph is None:
            held[GRAPH] = graph_bytes(self.dataset)
        if self.sequences.paths is not None:
            held["a tree of codes"] = self.sequences.paths.num_bytes
        return held

    @property
    def catalog_bytes(self) -> int:
        table = self.model.table_of_catalog
        if table is None:
            return 0
        num_rows = len(self.dataset.items)
        if isinstance(self.model, PrefixDecoderConfig):
            sizes = [len(codes) for codes in self._paths.tree.codes]
            num_rows = sum(sizes[: num_levels_within(sizes, self.model.held_prefixes)])
        return 4 * self.model.tables[table] * num_rows

    @property
    def _paths(self) -> PrefixPaths:
        assert self.sequences.paths is not None, "of models that read the table of prefixes"
        return self.sequences.paths

    def validation(self, features: RowFeatures) -> NextItemValidation:
        return NextItemValidation(self, features)

    @property
    def metric(self) -> str:
        return f"{self.config.evaluation.metric}@10"

    @property
    def judged_by(self) -> dict[str, bool]:
        return dict.fromkeys(user_scores(np.zeros(1)), True)

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        return ("recall@10", "ndcg@10")

    @cached_property
    def instruction(self) -> dict[Part, int]:
        """What users are ranked for in validation and evaluation."""
        return evaluation_instruction(self.config, self.model, self.dataset)

    def catalog_known_to(self, state: RunState) -> Catalog:
        """The catalog, and which of its items a run was trained on; what is said of items weighs as there."""
        known_I = self._known_to(state)
        catalog = self.learning_on(state).catalog
        return catalog if known_I.all() else replace(catalog, known_I=known_I)

    def learning_on(self, state: RunState) -> Self:
        """What is said of items weighs as in the run: if it were counted in other items, the same words would
        have vectors of other lengths, and other words would be read."""
        if self.model.item_content is None:
            return self
        counted_I = self._known_to(state)
        if state.content_items is not None:
            counted_I[counted_I] = unpacked(state.content_items, int(counted_I.sum()))
        if np.array_equal(counted_I, self.counted_I):
            return self
        content = _content(self.model, self.dataset, counted_I)
        return replace(self, counted_I=counted_I, catalog=replace(self.catalog, content=content))

    def _known_to(self, state: RunState) -> BoolArray:
        """[I] the items that were in the catalog of a run."""
        if self.earlier is not None:
            return self.earlier.known_I.copy()
        if self.registry is None:
            return np.ones(len(self.dataset.items), dtype=np.bool_)
        return self.registry.known_to(state.semantic_ids_version or "")


def _check_labels(
    theirs: Mapping[str, list[str]] | None,
    ours: Mapping[str, list[str]] | None,
    data: Dataset,
    where: str,
    way_out: str,
) -> None:
    """Refuse codes of labels that have other names in a data set than where a model has learned them."""
    for label, names in (theirs or {}).items():
        if (found := (ours or {}).get(label, names)) != names:
            raise InputError(
                f"{where}: was trained on events whose {label} is one of {', '.join(names)}, and in "
                f"{data.root} it is one of {', '.join(found)}: what was learned of them does not fit; "
                f"{way_out}"
            )


def _content(model: SequenceModelConfig, dataset: Dataset, counted_I: BoolArray) -> ItemBags | None:
    """What the model reads of what is said of items; None where that is nothing."""
    if (content := model.item_content) is None:
        return None
    return item_content(dataset, content.columns, content.buckets, content.min_items, counted_I)


def _vocabulary(model: SequenceModelConfig, registry: SemanticIdRegistry | None) -> Vocabulary | None:
    if not isinstance(model, ItemLanguageConfig):
        return None
    assert registry is not None, "it generates semantic IDs"
    return item_vocabulary(model, registry)


def check_split(dataset: Dataset, split: Split) -> None:
    """Refuse a split without targets.

    Raises:
        InputError: no user has a target in the split.
    """
    if not dataset.num_evaluated(split):
        raise InputError(
            f"{dataset.root}: no user has an item to predict in the split {split!r}; "
            "prepare the data set with another split"
        )


@dataclass(frozen=True)
class NextItemValidation:
    """Rank all items for users of `valid`, seen ones masked unless the config says otherwise."""

    task: NextItemTask
    features: RowFeatures

    def batches(self) -> Iterator[SampleBatch]:
        """The users are in an order that hashes their ids, so the first `max_users` are a random sample."""
        evaluation = self.task.config.evaluation
        return evaluation_batches(
            self.task.dataset,
            "valid",
            evaluation.batch_size,
            evaluation.max_users,
            with_times=self.features.needs_history_times,
            labels=self.features.history_labels,
        )

    def ask(self, worker: Any, trainer: Any, batch: SampleBatch) -> Any:
        prepared = worker.ranking.remote(batch.instructed(self.task.instruction))
        exclude_seen = self.task.config.evaluation.exclude_seen
        return trainer.recommend.remote(prepared, LIST_LENGTH, exclude_seen=exclude_seen)

    def report(self, answers: Iterable[tuple[SampleBatch, RankedItems]]) -> dict[str, Estimate]:
        places = []
        for samples, ranked in answers:
            assert samples.targets_B is not None
            targets_B = self.task.dataset.item_positions(samples.targets_B)
            places.append(target_places(ranked.items_BK, targets_B))
        return summarize(np.concatenate(places))

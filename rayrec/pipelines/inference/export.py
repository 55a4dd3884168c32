"""`rayrec export`: a trained model as other programs load it, by the kind of its run.

Axes: I items of the catalog, D width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rayrec.models.generative.item_language import ItemLanguageBackbone
from rayrec.models.generative.item_language_config import ItemLanguageConfig
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.keras.export import check_is_new
from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.models.tokenizers.vector_sources import write_vectors
from rayrec.pipelines.inference.item_ranker import give_catalog, item_ranker_of
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.scorer import Scorer, check_can_be_exported
from rayrec.pipelines.inference.writer import TextWriter, write_network
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.item_prompts import item_tokenizer, item_vocabulary
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.platform.errors import InputError
from rayrec.samples.prepare.writer import whole_folder

ITEM_VECTORS = "items.npy"
"""[I, D] float32; the keys of the items are beside it, one a line, in a file of the same name that ends in
`.txt`."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    layout: str
    committed_step: int
    labels: tuple[str, ...] = ()
    """Of a ranking model, in the order of its outputs."""
    num_items: int | None = None
    """Items that have a vector, of a model that scores items by vectors."""


def export_run(
    run: str | Path, folder: Path, which: str = "best", data: str | Path | None = None
) -> Exported:
    """Write a run's model into a folder: of Keras on TensorFlow as a SavedModel; of language, with or without
    codes of items among its words, in the layout of Hugging Face; of next items, the vectors that it scores
    items by (`ITEM_VECTORS`), which `rayrec tokenize --vector-file` reads.

    Args:
        folder: made here.
        which, data: as of `Scorer.load`.

    Raises:
        InputError: there is no such run, it is of another kind, or the folder is there already; what cannot
            be exported is not loaded first.
    """
    opened = RunFolder.open(Path(run))
    model = opened.config.model
    if model.kind in ("language", "next_item") and folder.exists():
        raise InputError(f"{folder}: is there already; give another folder, or remove it")
    if model.kind == "language":
        writer = TextWriter.load(run, which, data=data)
        writer.export(folder)
        return Exported("Hugging Face", writer.committed_step)
    if isinstance(model, ItemLanguageConfig):
        return _export_item_language(TrainedModel.load(run, which, data=data), model, folder)
    if isinstance(model, SequenceModelConfig):
        if not model.has_item_vectors:
            raise InputError(
                f"{opened.name}: {model.name!r} has no vectors of items to export; models that "
                "score every item by one have, such as 'sasrec', 'hstu' and 'prefix_decoder' with softmax "
                "'items'"
            )
        return _export_item_vectors(TrainedModel.load(run, which, data=data), folder)
    check_can_be_exported(opened.name, opened.config)
    check_is_new(folder)
    scorer = Scorer.load(run, which, data=data)
    scorer.export(folder)
    return Exported("SavedModel", scorer.committed_step, tuple(scorer.labels))


def _export_item_vectors(trained: TrainedModel, folder: Path) -> Exported:
    """Write [I, D] vectors, and beside them the items' keys, one a line.

    Items without a training event are left out, as far as the data set knows them, unless the model has
    learned what is said of them: vectors of ids say no more than that nobody met them.
    """
    program, task = item_ranker_of(trained), trained.assembly.task
    assert isinstance(task, NextItemTask), "what ranks items is of it"
    give_catalog(program, trained)
    items, catalog = task.dataset.items, task.catalog_known_to(trained.state)
    has_vector_I = task.learning_on(trained.state).counted_I.copy()
    if catalog.known_I is not None:
        has_vector_I &= catalog.known_I
    if catalog.content is not None and task.model.learns_words_alone:
        has_vector_I |= catalog.content.share_features_with(has_vector_I)
    keys = items.keys.filter(pa.array(has_vector_I)).to_pylist()
    made = {
        "run": trained.run,
        "step": trained.state.committed_step + 1,
        "dataset_fingerprint": task.fingerprint,
    }
    with whole_folder(folder) as draft:
        write_vectors(draft / ITEM_VECTORS, program.item_vectors()[has_vector_I], keys, made)
    return Exported("item vectors", trained.state.committed_step, num_items=len(keys))


def _export_item_language(trained: TrainedModel, model: ItemLanguageConfig, folder: Path) -> Exported:
    """Write a network with codes among its words. Rows of tables and their projections are no part of it.

    Raises:
        InputError: its prompt has rows of tables, without which it would be another model.
    """
    if tables := model.template.tables:
        raise InputError(
            f"{trained.run}: model.prompt has the slot {{table:{tables[0]}}}, whose rows lie on parameter "
            "servers and no other program reads; serve the run, or train one whose prompt has text and codes "
            "alone"
        )
    task, network = trained.assembly.task, item_ranker_of(trained).model
    assert isinstance(task, NextItemTask), "of an item_language"
    assert task.registry is not None, "it generates semantic IDs"
    assert isinstance(network, GenerativeRecommender), "of an item_language"
    assert isinstance(network.backbone, ItemLanguageBackbone), "of an item_language"
    made = {
        "run": trained.run,
        "step": trained.state.committed_step + 1,
        "dataset_fingerprint": task.fingerprint,
        "semantic_ids_version": task.registry.version,
        "prompt": model.prompt,
        "event": model.event,
        "max_tokens": model.max_tokens,
    }
    write_network(
        folder,
        network.backbone.network,
        item_tokenizer(model, task.registry),
        item_vocabulary(model, task.registry),
        model.lora is not None,
        made,
    )
    return Exported("Hugging Face", trained.state.committed_step)

"""`rayrec export`: a trained model as other programs load it, by the kind of its run.

Axes: I items of the catalog, D width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayrec.models.generative.item_language import ItemLanguageBackbone
from rayrec.models.generative.item_language_config import ItemLanguageConfig
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.keras.export import check_is_new
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
    if opened.config.model.kind == "language":
        if folder.exists():
            raise InputError(f"{folder}: is there already; give another folder, or remove it")
        writer = TextWriter.load(run, which, data=data)
        writer.export(folder)
        return Exported("Hugging Face", writer.committed_step)
    if opened.config.model.kind == "next_item":
        if folder.exists():
            raise InputError(f"{folder}: is there already; give another folder, or remove it")
        trained = TrainedModel.load(run, which, data=data)
        if isinstance(opened.config.model, ItemLanguageConfig):
            return _export_item_language(trained, opened.config.model, folder)
        return _export_item_vectors(trained, folder)
    check_can_be_exported(opened.name, opened.config)
    check_is_new(folder)
    scorer = Scorer.load(run, which, data=data)
    scorer.export(folder)
    return Exported("SavedModel", scorer.committed_step, tuple(scorer.labels))


def _export_item_vectors(trained: TrainedModel, folder: Path) -> Exported:
    """Write [I, D] vectors, and beside them the items' keys, one a line.

    An item without a training event is not written, for its vector is as it was initialized, unless the model
    reads its words and attributes.

    Raises:
        InputError: the model scores items by something else.
    """
    program, task = item_ranker_of(trained), trained.assembly.task
    assert isinstance(task, NextItemTask), "what ranks items is of it"
    give_catalog(program, trained)
    vectors_ID = program.item_vectors()
    if vectors_ID is None:
        raise InputError(
            f"{trained.run}: {task.model.name!r} has no vector of an item to export: it generates codes; "
            "export a model that scores items, such as 'sasrec'"
        )
    items = task.dataset.items
    is_known_I = (items.train_counts_I > 0) | (task.model.item_content is not None)
    keys = [key for key, is_known in zip(items.keys.to_pylist(), is_known_I, strict=True) if is_known]
    with whole_folder(folder) as draft:
        write_vectors(draft / ITEM_VECTORS, vectors_ID[is_known_I], keys)
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

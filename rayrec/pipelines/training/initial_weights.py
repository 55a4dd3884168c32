"""What a run begins with instead of random weights: the best snapshot of another (`training.init_from`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rayrec.models.language.config import LanguageModelConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import Snapshot, read_snapshot
from rayrec.pipelines.tasks.assembly import Assembly, is_of, open_earlier_task
from rayrec.pipelines.tasks.language import LanguageTask
from rayrec.pipelines.tasks.task import Task
from rayrec.pipelines.tasks.text_rows import tokenizer_of
from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import differing_keys
from rayrec.platform.errors import InputError

FREE = (
    "attention",
    "beam_width",
    "backbone.dropout",
    "dropout",
    "label_smoothing",
    "loss",
    "softmax",
    "negatives_per_event",
    "num_negatives",
    "negative_sampling",
    "behavior_weights",
    "instruction.drop",
    "experts.per_token",
    "experts.balance_weight",
    "retrieval.max_length",
    "retrieval.num_events",
    "retrieval.num_recent",
    "retrieval.q2i_weight",
    "retrieval.q2i_temperature",
    "retrieval.q2i_negatives",
    "alignment",
    "aligned_items",
    "learn_history",
    "title_characters",
)
"""Settings of a model that its weights do not depend on."""
OF_LANGUAGE = ("rows", "template", "learn", "long_rows", "max_length", "tokenizer")
"""Likewise of language models; the tokenizers themselves are compared."""


def initial_snapshot(assembly: Assembly) -> Snapshot | None:
    """Where the weights and rows come from; None for a run that begins with random ones.

    It is the best one in validation, or the last of a run that validated nothing.

    Raises:
        InputError: it is no run or has no snapshot, the snapshot is damaged, or it is of another model or
            version of the semantic IDs; or of a data set that this one does not go on from, or that is not
            there any more. A language model may go on with any other, if its tokens are the same.
    """
    config = assembly.config
    if config.training.init_from is None:
        return None
    folder = RunFolder.open(Path(config.training.init_from))
    theirs = folder.config.model
    if theirs.quantization is not None:
        raise InputError(
            f"training.init_from: {folder.path} is quantized, and no training begins with its weights; name "
            f"the run that it was made of ({folder.state.get('quantized_from', 'whose weights are float32')})"
        )
    free = FREE + OF_LANGUAGE if config.model.kind == "language" else FREE
    otherwise = (
        "or write it by `rayrec export` and name the folder as model.base"
        if config.model.kind == "language"
        else "or begin without init_from"
    )
    changed = (
        ["name"]
        if theirs.name != config.model.name
        else [
            key
            for key in differing_keys(theirs, config.model)
            if key not in free and key.partition(".")[0] not in free
        ]
    )
    if not changed and theirs.tables != config.model.tables:
        changed = ["alignment"]  # whose prompts name rows of tables
    if changed:
        raise InputError(
            f"training.init_from: the model of {folder.path} differs from this one in "
            f"{', '.join(f'model.{key}' for key in changed)}, so that its weights do not fit; take its "
            f"settings ({folder.path / 'config.yaml'}), {otherwise}"
        )
    snapshot = read_snapshot(folder.chosen_snapshot("best" if folder.state["best"] is not None else "last"))
    task = assembly.task
    if isinstance(task, LanguageTask):
        assert isinstance(theirs, LanguageModelConfig), "its name is the same"
        if tokenizer_of(theirs).version != task.tokenizer.version:
            raise InputError(
                f"training.init_from: {snapshot.path} was trained with another tokenizer, so that its "
                "weights stand for other tokens; give that one (model.tokenizer), or begin without init_from"
            )
        return snapshot
    where = str(snapshot.path)
    if is_of(snapshot.state, task):
        task.check_state(snapshot.state, where)
        return snapshot
    earlier = _earlier_task(folder, snapshot, config.data.path)
    task.check_goes_on_from(earlier, where)
    state = replace(
        snapshot.state,
        dataset_fingerprint=task.fingerprint,
        semantic_ids_version=task.semantic_ids_version,
        content_items=task.content_items,
    )
    return _OnEarlierData(snapshot.path, state, snapshot.chain, task, earlier.row_ids())


@dataclass(frozen=True)
class _OnEarlierData(Snapshot):
    """A snapshot of a run on an earlier data set, as if it were one of this."""

    task: Task
    rows: Mapping[str, Int64Array]
    """Whose rows its weights have."""

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return self.task.weights_from(super().weights, self.rows)


def _earlier_task(folder: RunFolder, snapshot: Snapshot, data: str) -> Task:
    """That of a run whose data set is another one than `data`, as it was trained.

    Raises:
        InputError: its data set is not there any more.
    """
    theirs = folder.config.data.path
    why = f"training.init_from: {folder.path} was trained on another data set than {data} is now"
    way_out = f"prepare again in {theirs} what it was trained on, or begin without init_from"
    if theirs != data:
        way_out = (
            f"{theirs} says what its weights stand for: leave it, or {way_out}; each data set into a folder "
            "of its own"
        )
    return open_earlier_task(folder.config, snapshot.state, why, way_out)

"""`rayrec export`: a trained model as other programs load it, by the kind of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayrec.models.keras.export import check_is_new
from rayrec.pipelines.inference.scorer import Scorer, check_can_be_exported
from rayrec.pipelines.inference.writer import TextWriter
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.errors import InputError


@dataclass(frozen=True)
class Exported:
    """What was written."""

    layout: str
    committed_step: int
    labels: tuple[str, ...] = ()
    """Of a ranking model, in the order of its outputs."""


def export_run(
    run: str | Path, folder: Path, which: str = "best", data: str | Path | None = None
) -> Exported:
    """Write a run's model into a folder: of Keras on TensorFlow as a SavedModel, of language in the layout of
    Hugging Face.

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
    check_can_be_exported(opened.name, opened.config)
    check_is_new(folder)
    scorer = Scorer.load(run, which, data=data)
    scorer.export(folder)
    return Exported("SavedModel", scorer.committed_step, tuple(scorer.labels))

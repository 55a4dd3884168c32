"""A trained Keras model as a SavedModel, and such a model as a scorer.

Its function `serve` takes what the model's inputs get, rows looked up already, and gives probabilities [B,
T]; so TensorFlow's own server runs it as it is. Beside it lies what the inputs and labels are
(`rayrec_inputs.json`), by which a `SavedModelScorer` makes them of a batch and its rows. The rows themselves
stay where they are: in the tables of the run.

Axes: B impressions, T labels.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec.models.ctr.tensors import Impressions, ImpressionTensors
from rayrec.models.keras.inputs import ModelInput, gather
from rayrec.models.keras.runtime import load_keras, load_tensorflow
from rayrec.models.keras.tensorflow_model import TensorFlowModel
from rayrec.models.keras.tensors import to_tensorflow
from rayrec.models.program.program import Rows
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_json

INPUTS_FILE = "rayrec_inputs.json"


def export_saved_model(model: TensorFlowModel, folder: Path) -> None:
    """Write the model as a SavedModel.

    Args:
        folder: made here.

    Raises:
        InputError: the model does not run on TensorFlow, or the folder is there already.
    """
    if not isinstance(model, TensorFlowModel):
        raise InputError(
            "a SavedModel is made of a Keras model on TensorFlow, and this one is not; train it with "
            "model.backend 'tensorflow'"
        )
    check_is_new(folder)
    keras = load_keras("tensorflow")
    model.write_back()
    archive = keras.export.ExportArchive()
    archive.track(model.keras_model)
    archive.add_endpoint("serve", model.probabilities, input_signature=[model.input_specs()])
    inputs = [dataclasses.asdict(one) for one in model.inputs]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Under its name it is there as a whole or not at all.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as begun:
        written = Path(begun) / folder.name
        archive.write_out(str(written), verbose=False)
        write_json(written / INPUTS_FILE, {"labels": model.labels, "inputs": inputs})
        written.rename(folder)


def check_is_new(folder: Path) -> None:
    """Refuse a folder that exists.

    Raises:
        InputError: there is such a folder.
    """
    if folder.exists():
        raise InputError(
            f"{folder}: a SavedModel is written to a new folder, and this one exists; name another"
        )


class SavedModelScorer:
    """Scores with what `export_saved_model` wrote; on the CPU."""

    labels: tuple[str, ...]
    """What is predicted, in the order of the columns."""

    def __init__(
        self, tensorflow: Any, loaded: Any, inputs: tuple[ModelInput, ...], labels: tuple[str, ...]
    ) -> None:
        self.labels = labels
        self._tensorflow = tensorflow
        self._loaded = loaded
        self._inputs = inputs

    @classmethod
    def load(cls, folder: Path, num_threads: int | None = None) -> SavedModelScorer:
        """Load an exported SavedModel.

        Args:
            num_threads: of TensorFlow; None: as many as PyTorch has.

        Raises:
            InputError: TensorFlow is missing, or the folder is not one of ours.
        """
        if not (folder / INPUTS_FILE).is_file():
            raise InputError(
                f"{folder}: expected a SavedModel with {INPUTS_FILE} beside it, as an export writes"
            )
        tensorflow = load_tensorflow(num_threads or torch.get_num_threads())
        described = json.loads((folder / INPUTS_FILE).read_text())
        inputs = tuple(ModelInput(**one) for one in described["inputs"])
        loaded = tensorflow.saved_model.load(str(folder))
        return cls(tensorflow, loaded, inputs, tuple(described["labels"]))

    def predict(self, features: Impressions, rows: Rows) -> np.ndarray:
        """[B, T] float32 probabilities."""
        batch = ImpressionTensors.build(features, rows, 0, HOST.torch, training=False)
        given = {
            one.name: to_tensorflow(self._tensorflow, tensor)
            for one, tensor in zip(self._inputs, gather(self._inputs, batch), strict=True)
        }
        predicted: np.ndarray = self._loaded.serve(given).numpy()
        return predicted

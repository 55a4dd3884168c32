"""What needs a process of its own: Keras has one backend in each, and modules are imported once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.models.keras.program import KerasProgramSpec
from rayrec.platform.errors import InputError
from tests.models.keras.impressions import PLACEMENT, SCHEMA, SETTINGS
from tests.models.keras.programs import config, needs_tensorflow, program, train

CHECKOUT = Path(__file__).parents[3]
STEPS = range(50)

pytestmark = needs_tensorflow


def run(code: str, *arguments: str) -> str:
    """What it prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True).stdout


def curve_on_torch(weights: Path, losses: Path) -> None:
    """In a process of its own: the losses of the model on Keras's PyTorch backend."""
    spec = KerasProgramSpec(config("heads").model_copy(update={"backend": "torch"}), SCHEMA, SETTINGS)
    trained = spec.build(PLACEMENT)
    trained.load(dict(np.load(weights)), None)
    np.save(losses, train(trained, STEPS))
    assert isinstance(trained.model.keras_model, torch.nn.Module)


def test_a_model_learns_the_same_on_both_backends(tmp_path):
    trained = program("heads")
    np.savez(tmp_path / "weights.npz", **trained.weights())
    ours = train(trained, STEPS)

    run(
        "import sys, pathlib, torch; torch.set_num_threads(1)\n"
        "from tests.models.keras.test_keras_backends import curve_on_torch\n"
        "curve_on_torch(*map(pathlib.Path, sys.argv[1:]))",
        *(str(tmp_path / name) for name in ("weights.npz", "losses.npy")),
    )

    np.testing.assert_allclose(np.load(tmp_path / "losses.npy"), ours, rtol=0, atol=1e-4)


def refusal_on_torch(builder: str) -> None:
    """In a process of its own: prints why the builder's model is refused."""
    settings = config("mlp").model_copy(
        update={"builder": f"tests.models.keras.test_keras_build:{builder}", "backend": "torch"}
    )
    with pytest.raises(InputError) as raised:
        KerasProgramSpec(settings, SCHEMA, SETTINGS).build(PLACEMENT)
    print(raised.value)


def test_what_changes_weights_is_refused_on_torch_before_a_run_begins():
    shown = run(
        "from tests.models.keras.test_keras_backends import refusal_on_torch\n"
        "refusal_on_torch('normalized'), refusal_on_torch('assigning')"
    )

    normalized, assigning = shown.splitlines()
    assert "changes 'norm/moving_mean' while it is trained" in normalized
    assert "changes 'bounded/bias' by other ways than its gradient" in assigning


def test_tensorflow_may_be_imported_first():
    run(
        "import tensorflow, torch; torch.set_num_threads(1)\n"
        "from tests.models.keras.programs import program, train\n"
        "assert train(program(), range(2))[0] > 0\n"
        "threads = tensorflow.config.threading\n"
        "assert threads.get_intra_op_parallelism_threads() == 1\n"
    )

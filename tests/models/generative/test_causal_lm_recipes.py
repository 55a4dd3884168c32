"""Recipes of causal language models, whose networks come from another library."""

import numpy as np
import pytest

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.sequence.sequence_program import SequenceProgram, flops_of
from rayrec.platform.schedule import RateSchedule
from tests.models.networks import CPU, shares

pytest.importorskip("transformers")

from tests.models.generative.language_models import NETWORKS, NUM_ITEMS, ROWS, recommender


def losses_of(network, compute: ComputeSettings) -> list[float]:
    settings = DenseOptimizerSettings(1e-3, 0.0, RateSchedule(), None, fused=True)
    program = SequenceProgram(recommender(network), settings, CPU, seed=0, compute=compute)
    losses = []
    for step in range(3):
        (features,) = shares(ROWS, NUM_ITEMS, step=step)
        losses.append(program.backward(features, {}).loss_sum)
        program.update()
    return losses


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_they_train_in_pieces_and_in_bfloat16_as_they_do_otherwise(network):
    expected = losses_of(network, PLAIN)

    np.testing.assert_allclose(losses_of(network, ComputeSettings(micro_batches=2)), expected, rtol=1e-4)
    np.testing.assert_allclose(losses_of(network, ComputeSettings(precision="bfloat16")), expected, rtol=0.05)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_their_operations_are_counted(network):
    (features,) = shares(ROWS, NUM_ITEMS)
    model = recommender(network)

    assert flops_of(model, CPU).of(features, {}) > 0
    assert all(parameter.grad is None for parameter in model.parameters())

"""bfloat16 weights with float32 masters train as float32 weights do, and their snapshots are the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.errors import InputError
from tests.helpers.examples import cases
from tests.models.networks import CPU, table_rows
from tests.models.recipes import MODELS, ONE_OF_EACH_KIND, SETTINGS, features_of, model_of

PLAIN = ComputeSettings(precision="bfloat16")
MASTERS = ComputeSettings(precision="bfloat16", weights="bfloat16_with_master")


def program(name: str, compute: ComputeSettings, **settings) -> SequenceProgram:
    return SequenceProgram(
        model_of(name), dataclasses.replace(SETTINGS, **settings), CPU, seed=5, compute=compute
    )


def train(trained: SequenceProgram, name: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        (features,) = features_of(name, step)
        losses.append(trained.backward(features, table_rows(features)).loss_sum / features.num_targets)
        trained.update()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", cases((name for name in MODELS if name != "causal_lm"), ONE_OF_EACH_KIND))
def test_masters_train_about_as_float32_weights_do(name):
    with_masters, without = program(name, MASTERS), program(name, PLAIN)

    losses, expected = train(with_masters, name, range(8)), train(without, name, range(8))

    np.testing.assert_allclose(losses, expected, rtol=0.05 if "experts" in MODELS[name] else 0.02)
    matrices = [weight for weight in with_masters.model.parameters() if weight.ndim > 1]
    assert {weight.dtype for weight in matrices} == {torch.bfloat16}
    assert all(weight.dtype == np.float32 for weight in with_masters.weights().values())


def test_steps_too_small_for_bfloat16_add_up_in_the_masters():
    name = "sasrec"
    trained = program(name, MASTERS, learning_rate=1e-5, weight_decay=0.0)
    before = trained.weights()["items_ID"]

    train(trained, name, range(20))

    moved = np.abs(trained.weights()["items_ID"] - before)
    assert 1e-5 < moved.max() < 3e-4  # a bfloat16 near 0.05 can move by 2.4e-4 or not at all
    narrow = torch.tensor(trained.weights()["items_ID"]).to(torch.bfloat16)
    assert torch.equal(trained.model.items_ID.detach(), narrow)


@pytest.mark.parametrize("name", ["sasrec", "light_decoder"])
def test_a_run_of_either_kind_goes_on_with_the_others_snapshot(name):
    for first, second in ((MASTERS, PLAIN), (PLAIN, MASTERS), (MASTERS, MASTERS)):
        begun, continued = program(name, first), program(name, second)
        train(begun, name, range(3))

        continued.load(begun.weights(), begun.optimizer_state())

        for key, value in begun.weights().items():
            assert continued.weights()[key].tobytes() == value.tobytes()
        losses = train(continued, name, range(3, 6))
        expected = train(begun, name, range(3, 6))
        if first == second:
            assert losses == expected
            for key, value in begun.weights().items():
                assert continued.weights()[key].tobytes() == value.tobytes()
        else:
            np.testing.assert_allclose(losses, expected, rtol=0.02)


def test_ranking_is_float32_and_leaves_training_as_it_was():
    name = "light_decoder"
    ranked, plain, left_alone = program(name, MASTERS), program(name, PLAIN), program(name, MASTERS)
    (features,) = features_of(name)
    train(ranked, name, range(2))
    plain.load(ranked.weights(), None)

    found = ranked.recommend(features, table_rows(features), 3, None)

    expected = plain.recommend(features, table_rows(features), 3, None)
    assert found.scores_BK.tobytes() == expected.scores_BK.tobytes()
    train(left_alone, name, range(2))
    assert train(ranked, name, range(2, 4)) == train(left_alone, name, range(2, 4))


def test_gradients_of_pieces_are_added_up_in_float32():
    name = "sasrec"
    whole, pieces = (program(name, dataclasses.replace(MASTERS, micro_batches=pieces)) for pieces in (1, 3))

    np.testing.assert_allclose(train(pieces, name, range(4)), train(whole, name, range(4)), rtol=0.02)
    assert all(parameter.grad is None for parameter in pieces.model.parameters() if parameter.ndim > 1)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({}, "training.precision 'float32'.*set precision to 'bfloat16'"),
        ({"precision": "bfloat16", "parallel": "fsdp2"}, "'fsdp2', whose parts are float32"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(training, message):
    values = {"weights": "bfloat16_with_master", **training}

    with pytest.raises(InputError, match=message):
        RunConfig.parse(
            {
                "data": {"path": "data"},
                "model": {"name": "sasrec"},
                "training": values,
                "pipeline": {"num_trainers": 2},
            }
        )

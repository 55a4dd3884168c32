"""Whole steps of training and ranking on every accelerator that is here, against the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.platform.devices import HOST, KINDS, device_memory, device_named, hardware_name, why_missing
from tests.models.ctr.programs import RANKING, ranking_program
from tests.models.generative import prompt_models
from tests.models.keras import impressions
from tests.models.networks import DIM, table_rows
from tests.models.recipes import MODELS, SETTINGS, features_of, model_of

ACCELERATORS = [kind for kind in KINDS if device_named(kind).has_own_memory]
STEPS = 3
NAMES = tuple(name for name in MODELS if name != "causal_lm")


@pytest.fixture(params=ACCELERATORS)
def device(request) -> torch.device:
    if (missing := why_missing(request.param)) is not None:
        pytest.skip(f"nothing is trained on {request.param}: {missing}")
    return device_named(request.param).torch


def program(name: str, device: torch.device, compute: ComputeSettings = PLAIN) -> SequenceProgram:
    settings = dataclasses.replace(SETTINGS, fused=device_named(device.type).fused_optimizer)
    return SequenceProgram(model_of(name), settings, device, seed=5, compute=compute)


def train(trained: SequenceProgram, name: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        (features,) = features_of(name, step)
        gradients = trained.backward(features, table_rows(features))
        losses.append(gradients.loss_sum / features.num_targets)
        trained.update()
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_a_device_trains_as_the_host(name, device):
    """Forward, dropout, backward, clipping and the optimizer's step."""
    there, here = program(name, device), program(name, HOST.torch)
    assert {parameter.device.type for parameter in there.model.parameters()} == {device.type}

    losses = train(there, name, range(STEPS))

    np.testing.assert_allclose(losses, train(here, name, range(STEPS)), rtol=1e-4)
    for weight_name, weight in here.weights().items():
        np.testing.assert_allclose(there.weights()[weight_name], weight, rtol=2e-3, atol=2e-5)


def test_prompts_are_learned_and_answered_on_a_device_as_on_the_host(device):
    pytest.importorskip("transformers")
    batch = prompt_models.features()
    users, answers, losses = prompt_models.users_of(batch), [], []
    for where in (device, HOST.torch):
        settings = dataclasses.replace(SETTINGS, fused=device_named(where.type).fused_optimizer)
        model = prompt_models.model(attention="auto")
        made = SequenceProgram(model, settings, where, seed=5)
        of_device = []
        for _ in range(STEPS):
            of_device.append(made.backward(batch, users).loss_sum)
            made.update()
        losses.append(of_device)
        answers.append(made.recommend(batch, users, 3, None).scores_BK)

    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-3, atol=1e-3)


def rows_by_id(ids_M):
    rows = [np.random.default_rng(ident % 2**64).normal(size=DIM) for ident in ids_M.tolist()]
    return np.array(rows, dtype=np.float32).reshape(-1, DIM)


@pytest.mark.parametrize("name", NAMES)
def test_a_device_ranks_as_the_host(name, device):
    there, here = program(name, device), program(name, HOST.torch)
    (features,) = features_of(name)
    excluded_BE = np.array([[4, -1], [2, 3], [-1, -1], [0, 1], [8, -1], [5, -1]])[
        : len(features.offsets_B1) - 1
    ]
    for trained in (there, here):
        if trained.table_of_catalog is not None:
            trained.take_catalog(np.arange(9), rows_by_id)

    ranked = there.recommend(features, table_rows(features), 3, excluded_BE)

    expected = here.recommend(features, table_rows(features), 3, excluded_BE)
    np.testing.assert_allclose(ranked.scores_BK, expected.scores_BK, rtol=1e-4, atol=1e-5)
    assert ranked.items_BK.tolist() == expected.items_BK.tolist()


@pytest.mark.parametrize("name", ["prefix_decoder", "encoder_decoder"])
def test_a_network_that_ranks_before_it_trains_trains_alike(name, device):
    """As one does that is judged first: what ranking has copied to the device is training's, too."""
    (features,) = features_of(name)
    trained = program(name, device)
    trained.recommend(features, table_rows(features), 3, None)

    losses = train(trained, name, range(STEPS))

    np.testing.assert_allclose(losses, train(program(name, device), name, range(STEPS)), rtol=1e-5)


def test_what_a_device_saved_the_host_goes_on_with_and_the_other_way_round(device):
    name = "light_decoder"
    whole = train(program(name, HOST.torch), name, range(2 * STEPS))
    for first, second in ((device, HOST.torch), (HOST.torch, device), (device, device)):
        begun, continued = program(name, first), program(name, second)
        train(begun, name, range(STEPS))

        continued.load(begun.weights(), begun.optimizer_state())

        for key, value in begun.weights().items():
            assert continued.weights()[key].tobytes() == value.tobytes()
        for key, value in begun.optimizer_state().items():
            assert continued.optimizer_state()[key].tobytes() == value.tobytes()
        losses = train(continued, name, range(STEPS, 2 * STEPS))
        np.testing.assert_allclose(losses, whole[STEPS:], rtol=1e-4)


@pytest.mark.parametrize(
    "compute",
    [
        ComputeSettings(precision="bfloat16"),
        ComputeSettings(precision="bfloat16", weights="bfloat16_with_master"),
        ComputeSettings(micro_batches=3),
    ],
    ids=["bfloat16", "masters", "in pieces"],
)
@pytest.mark.parametrize("name", ["sasrec", "light_decoder"])
def test_recipes_train_there_too(name, compute, device):
    losses = train(program(name, device, compute), name, range(STEPS))

    expected = train(program(name, HOST.torch, compute), name, range(STEPS))
    np.testing.assert_allclose(losses, expected, rtol=2e-2 if compute.precision == "bfloat16" else 1e-4)


def test_rows_on_the_device_have_their_gradients_there(device):
    name = "sampled"
    (features,) = features_of(name)
    rows = {table: torch.tensor(rows_MD, device=device) for table, rows_MD in table_rows(features).items()}

    row_grads = program(name, device).backward(features, rows).row_grads

    expected = program(name, HOST.torch).backward(features, table_rows(features)).row_grads
    for table, grads_MD in row_grads.items():
        assert grads_MD.device.type == device.type
        np.testing.assert_allclose(grads_MD.cpu().numpy(), expected[table], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        *((name, PLAIN) for name in RANKING),
        ("dlrm", ComputeSettings(precision="bfloat16")),
        ("din with prelu", ComputeSettings(precision="bfloat16")),
        ("mmoe", ComputeSettings(micro_batches=3)),
    ],
)
def test_ranking_models_train_and_score_as_on_the_host(name, compute, device):
    losses, scores = [], []
    for where in (device, HOST.torch):
        trained = ranking_program(name, where, compute)
        losses.append([])
        for step in range(STEPS):
            features = impressions.batch(step=step)
            losses[-1].append(trained.backward(features, impressions.table_rows(features)).loss_sum)
            trained.update()
        scores.append(trained.predict(features, impressions.table_rows(features)))

    is_short = compute.precision == "bfloat16"
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2 if is_short else 1e-4)
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-2 if is_short else 1e-4)


def test_a_device_says_what_it_is_and_what_is_taken_of_it(device):
    assert hardware_name(device).startswith(f"{device.type}:")
    memory = device_memory(device)
    assert memory is not None
    assert 0 <= memory.allocated <= memory.peak <= memory.total

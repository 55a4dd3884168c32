import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from examples.keras_dlrm import from_torch
from rayrec.models.base.compute import ComputeSettings
from rayrec.models.ctr.config import DlrmConfig
from rayrec.models.ctr.program import CtrProgramSpec
from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.models.keras.config import KerasModelConfig
from rayrec.models.keras.program import KerasProgramSpec
from rayrec.models.program.program import DivergedError, ScoringProgram
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import FEATURE_TABLE
from tests.models.keras.impressions import (
    CPU,
    DIM,
    NUM_IDS,
    PLACEMENT,
    SCHEMA,
    SETTINGS,
    batch,
    table_rows,
)
from tests.models.keras.programs import as_bytes, config, needs_tensorflow, program, train

pytestmark = needs_tensorflow


def test_training_lowers_the_loss_and_scores_are_probabilities():
    trained = program()
    features = batch(64)
    before, losses = trained.predict(features, table_rows(features)), train(trained, range(60))
    after = trained.predict(features, table_rows(features))

    assert isinstance(trained, ScoringProgram)
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:10])
    assert after.shape == (64, 2)
    assert after.dtype == np.float32
    assert ((after > 0) & (after < 1)).all()
    assert not np.array_equal(before, after)


def test_dlrm_of_keras_and_of_torch_have_the_same_losses():
    """200 steps through the same interface, from the same weights; rows are trained, too."""
    dims = {"bottom_dims": (8,), "hidden_dims": (16, 8)}
    of_torch = CtrProgramSpec(DlrmConfig(name="dlrm", dim=DIM, **dims), SCHEMA, SETTINGS).build(PLACEMENT)
    settings = KerasModelConfig(name="keras", builder="examples.keras_dlrm:build", arguments=dims, dim=DIM)
    of_keras = KerasProgramSpec(settings, SCHEMA, SETTINGS).build(PLACEMENT)
    of_keras.load(from_torch(of_torch.weights()), None)

    curves = []
    for trained in (of_torch, of_keras):
        table = np.random.default_rng(1).normal(size=(NUM_IDS, DIM), scale=0.1).astype(np.float32)
        losses = []
        for step in range(200):
            features = batch(step=step)
            ids_M = features.lookups[FEATURE_TABLE].ids_M
            gradients = trained.backward(features, {FEATURE_TABLE: table[ids_M]})
            trained.update()
            table[ids_M] -= 0.5 * gradients.row_grads[FEATURE_TABLE]
            losses.append(gradients.loss_sum / features.num_targets)
        curves.append(np.array(losses))

    np.testing.assert_allclose(*curves, rtol=0, atol=1e-4)
    assert curves[0][-20:].mean() < 0.9 * curves[0][:20].mean()


def test_steps_are_those_of_torchs_adamw():
    """50 steps with warm-up, weight decay and clipping; both layers have the same gradients, perhaps in the
    same memory, and each is scaled by its own right."""
    trained = program("two_sums")
    start = {name: torch.tensor(weight) for name, weight in trained.weights().items()}
    parameters = {name: weight.requires_grad_() for name, weight in start.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=SETTINGS.learning_rate, weight_decay=0.1, eps=1e-8)

    for step in range(50):
        features = batch(step=step)
        trained.backward(features, table_rows(features))
        trained.update()

        tensors = ImpressionTensors.build(features, table_rows(features), 0, CPU, training=False)
        lists = [tensors.pool_list(column) for column in SCHEMA.lists]
        x = torch.cat([tensors.numbers_BF, tensors.embed_ids().flatten(1), *lists], dim=1)
        logits_BT = sum(
            x @ parameters[f"{name}/kernel"] + parameters[f"{name}/bias"] for name in ("once", "again")
        )
        known_BT = ~tensors.labels_BT.isnan()
        loss = functional.binary_cross_entropy_with_logits(
            logits_BT[known_BT], tensors.labels_BT[known_BT], reduction="sum"
        )
        optimizer.zero_grad()
        (loss / features.num_targets).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), SETTINGS.max_grad_norm)
        optimizer.param_groups[0]["lr"] = SETTINGS.learning_rate * min(1.0, (step + 1) / 5)
        optimizer.step()

    for name, weight in trained.weights().items():
        np.testing.assert_allclose(weight, parameters[name].detach().numpy(), rtol=0, atol=1e-6)


def test_row_gradients_are_those_of_the_mean_loss():
    """Of every kind of input, against differences in float32."""
    tested, features = program("heads"), batch()
    rows_MD = table_rows(features)[FEATURE_TABLE]
    given = tested.backward(features, {FEATURE_TABLE: rows_MD}).row_grads[FEATURE_TABLE]

    direction_MD = np.random.default_rng(0).normal(size=rows_MD.shape).astype(np.float32)
    step = 1e-2
    above, below = (
        tested.backward(features, {FEATURE_TABLE: rows_MD + sign * step * direction_MD}).loss_sum
        for sign in (1, -1)
    )

    slope = (above - below) / (2 * step) / features.num_targets
    assert (given * direction_MD).sum() == pytest.approx(slope, rel=5e-3)


def test_outputs_by_name_stand_in_the_order_of_the_labels():
    tested, features = program("heads"), batch()
    weights = tested.weights()
    weights["click/bias"][:] = 50.0

    tested.load(weights, None)

    assert (tested.predict(features, table_rows(features))[:, 0] > 0.99).all()


def test_rows_that_are_tensors_are_lent_and_their_gradients_are_tensors():
    tested, features = program(), batch()
    lent = torch.tensor(table_rows(features)[FEATURE_TABLE])
    before = lent.clone()

    given = tested.backward(features, {FEATURE_TABLE: lent}).row_grads[FEATURE_TABLE]

    assert isinstance(given, torch.Tensor)
    assert (
        given.numpy().tobytes()
        == tested.backward(features, table_rows(features)).row_grads[FEATURE_TABLE].tobytes()
    )
    assert torch.equal(lent, before)


def test_batches_of_any_size_share_one_trace():
    tested = program("heads")
    for num_rows in (1, 7, 33):
        features = batch(num_rows)
        tested.backward(features, table_rows(features))
        tested.predict(features, table_rows(features))

    functions = tested.model.functions
    assert [functions[training].experimental_get_tracing_count() for training in (True, False)] == [1, 1]


def test_loaded_state_continues_to_the_same_bits():
    whole, first = program(dropout=0.3), program(dropout=0.3)
    losses = train(whole, range(6))
    train(first, range(3))

    second = program(dropout=0.3)
    second.load(first.weights(), first.optimizer_state())

    assert train(second, range(3, 6)) == losses[3:]
    assert as_bytes(second.weights()) == as_bytes(whole.weights())
    assert as_bytes(second.optimizer_state()) == as_bytes(whole.optimizer_state())


def test_names_and_initial_weights_follow_from_the_seed_however_many_models_came_before():
    first, second = program(), program()

    assert sorted(first.weights()) == ["dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel"]
    assert as_bytes(first.weights()) == as_bytes(second.weights())
    other = dataclasses.replace(PLACEMENT, seed=6)
    third = KerasProgramSpec(config("mlp"), SCHEMA, SETTINGS).build(other)
    assert as_bytes(third.weights()) != as_bytes(first.weights())


def test_building_leaves_the_random_state_of_the_process_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()

    program()

    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_dropout_hangs_on_the_step_and_is_off_when_scoring():
    tested = program(dropout=0.5)

    def loss(step: int) -> float:
        features = dataclasses.replace(batch(), step=step)
        return tested.backward(features, table_rows(features)).loss_sum

    assert loss(3) == loss(3)
    assert loss(3) != loss(4)
    features = batch()
    scores = [tested.predict(features, table_rows(features)).tobytes() for _ in range(2)]
    assert scores[0] == scores[1]


def test_the_shares_of_two_trainers_add_up_to_the_whole_batch():
    def backward(rows: slice):
        sent: list[np.ndarray] = []
        trained = program(sum_over_trainers=lambda flat: lambda: sent.append(flat.numpy().copy()))
        features = batch(rows=rows)
        gradients = trained.backward(features, table_rows(features))
        trained.update()
        by_id = np.zeros((NUM_IDS, DIM))
        by_id[features.lookups[FEATURE_TABLE].ids_M] = gradients.row_grads[FEATURE_TABLE]
        return gradients.loss_sum, sent[0], by_id

    whole = backward(slice(None))
    parts = backward(slice(0, 5)), backward(slice(5, 16)), backward(slice(16, 16))

    for of_whole, *of_parts in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(sum(of_parts), of_whole, rtol=1e-4, atol=1e-6)


def test_micro_batches_add_up_to_the_whole_batch():
    features = batch()
    placement = dataclasses.replace(PLACEMENT, compute=ComputeSettings(micro_batches=3))
    pieces = KerasProgramSpec(config("heads"), SCHEMA, SETTINGS).build(placement)

    in_pieces, at_once = (one.backward(features, table_rows(features)) for one in (pieces, program("heads")))

    assert in_pieces.loss_sum == pytest.approx(at_once.loss_sum, rel=1e-5)
    np.testing.assert_allclose(
        in_pieces.row_grads[FEATURE_TABLE], at_once.row_grads[FEATURE_TABLE], rtol=1e-4, atol=1e-6
    )


def test_micro_batches_of_a_model_that_draws_are_refused():
    """Each piece would begin anew with what its first row says: other draws than those of the whole."""
    placement = dataclasses.replace(PLACEMENT, compute=ComputeSettings(micro_batches=3))

    with pytest.raises(InputError, match=r"training.micro_batches is 3, and the Keras model draws .*Dropout"):
        KerasProgramSpec(config("mlp", dropout=0.3), SCHEMA, SETTINGS).build(placement)


def test_a_loss_that_is_not_finite_stops_the_step():
    tested, features = program(), batch(step=7)
    rows_MD = table_rows(features)[FEATURE_TABLE]
    rows_MD[0, 0] = np.inf
    before = as_bytes(tested.weights())

    with pytest.raises(DivergedError, match="step 7: the loss is"):
        tested.backward(features, {FEATURE_TABLE: rows_MD})

    assert as_bytes(tested.weights()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("dense/bias"), r"\['dense/bias'\] are in only one"),
        (lambda weights: weights.update({"dense/bias": np.zeros(3)}), r"'dense/bias' has shape \(3,\)"),
    ],
)
def test_weights_of_another_model_are_refused(change, message):
    tested = program()
    weights = tested.weights()
    change(weights)

    with pytest.raises(ValueError, match=message):
        tested.load(weights, None)


@pytest.mark.parametrize(
    "compute",
    [
        ComputeSettings(precision="bfloat16"),
        ComputeSettings(compile=True),
        ComputeSettings(parallel="fsdp2"),
    ],
)
def test_what_only_torch_models_can_do_is_refused(compute):
    with pytest.raises(InputError, match="for PyTorch's own models"):
        KerasProgramSpec(config("mlp"), SCHEMA, SETTINGS).build(
            dataclasses.replace(PLACEMENT, compute=compute)
        )


def test_scoring_is_compiled_for_few_numbers_of_rows_and_traced_for_no_other():
    plain, compiled = program(), program()
    train(plain, range(3))
    compiled.load(plain.weights(), None)

    assert compiled.model.compile_scoring([4, 16])

    functions = {**compiled.model._compiled, None: compiled.model.functions[False]}
    for num_rows in (1, 3, 4, 5, 16, 17, 40):
        features = batch(num_rows)
        scores = compiled.predict(features, table_rows(features))
        assert scores.shape == (num_rows, 2)
        np.testing.assert_allclose(scores, plain.predict(features, table_rows(features)), atol=1e-6)
    assert {size: function.experimental_get_tracing_count() for size, function in functions.items()} == {
        4: 1,
        16: 1,
        None: 1,
    }


def test_compiled_scoring_is_for_scoring_alone():
    plain, compiled = program(), program()
    compiled.model.compile_scoring([64])

    assert train(compiled, range(3)) == train(plain, range(3))
    assert as_bytes(compiled.weights()) == as_bytes(plain.weights())


def test_new_weights_need_no_new_compilation():
    trained = program()
    trained.model.compile_scoring([64])
    features = batch(64)
    before = trained.predict(features, table_rows(features))

    train(trained, range(20))

    trained.model.functions[False] = None  # which would not answer
    assert not np.allclose(trained.predict(features, table_rows(features)), before)
    assert trained.model._compiled[64].experimental_get_tracing_count() == 1

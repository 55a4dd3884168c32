import dataclasses

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.sequence.item_losses import CrossEntropy, SampledSoftmax
from rayrec.models.sequence.next_item import DenseNextItemModel, SparseNextItemModel
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.platform.schedule import RateSchedule
from tests.models.networks import CPU, DIM, backbone, histories, shares, table_rows

NUM_ITEMS = 9
ROWS = [[1, 4, 2], [3, 5], [0, 8, 7, 6], [2, 3]]
SETTINGS = DenseOptimizerSettings(
    learning_rate=0.01, weight_decay=0.01, schedule=RateSchedule(), max_grad_norm=None, fused=True
)


def program(
    sum_over_trainers=None, dropout: float = 0.3, num_layers: int = 1, settings=SETTINGS
) -> SequenceProgram:
    torch.manual_seed(0)
    model = DenseNextItemModel(backbone(dropout, num_layers), CrossEntropy(), NUM_ITEMS, DIM)
    return SequenceProgram(model, settings, CPU, seed=5, sum_over_trainers=sum_over_trainers)


def train(trained: SequenceProgram, steps: range) -> list[float]:
    losses = []
    for step in steps:
        (features,) = shares(ROWS, NUM_ITEMS, tables=("user",), step=step)
        losses.append(trained.backward(features, table_rows(features)).loss_sum)
        trained.update()
    return losses


def test_training_lowers_the_loss():
    losses = train(program(dropout=0.0), range(30))

    assert losses[-1] < 0.5 * losses[0]


def test_row_gradients_are_those_of_the_mean_loss_over_the_global_batch():
    (features,) = shares(ROWS, NUM_ITEMS, tables=("user",))
    rows = table_rows(features)
    tested = program()
    gradients = tested.backward(features, rows)

    step = 1e-2
    nudged = {"user": rows["user"].copy()}
    nudged["user"][2, 3] += step
    slope = (tested.backward(features, nudged).loss_sum - gradients.loss_sum) / step / features.num_targets

    assert gradients.row_grads["user"].shape == (4, DIM)
    assert gradients.row_grads["user"][2, 3] == pytest.approx(slope, rel=0.05, abs=1e-4)


def test_rows_that_are_tensors_give_the_same_gradients_as_tensors():
    (features,) = shares(ROWS, NUM_ITEMS, tables=("user",))
    rows = table_rows(features)
    on_device = {name: torch.tensor(rows_MD, device=CPU) for name, rows_MD in rows.items()}

    gradients = program().backward(features, on_device).row_grads["user"]

    assert isinstance(gradients, torch.Tensor)
    assert gradients.numpy().tobytes() == program().backward(features, rows).row_grads["user"].tobytes()
    # What was lent is as it was: whoever lent it may not want a graph to hold on to it.
    assert not on_device["user"].requires_grad


@pytest.mark.parametrize("num_trainers", [2, 3, 5])
def test_the_shares_of_several_trainers_add_up_to_the_whole_batch(num_trainers):
    """Losses, dense gradients and row gradients; five trainers leave one of them without rows."""

    def backward(features):
        """(loss, row gradients, the flat dense gradient that goes to the other trainers)."""
        sent: list[np.ndarray] = []
        trained = program(lambda flat: lambda: sent.append(flat.numpy().copy()))
        gradients = trained.backward(features, table_rows(features))
        trained.update()
        return gradients.loss_sum, gradients.row_grads["user"], sent[0]

    (whole,) = shares(ROWS, NUM_ITEMS, tables=("user",))
    parts = shares(ROWS, NUM_ITEMS, tables=("user",), num_trainers=num_trainers)

    loss, row_grads_MD, flat = backward(whole)
    losses, row_grads, flats = zip(*map(backward, parts), strict=True)

    assert sum(losses) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(sum(flats), flat, rtol=1e-4, atol=1e-6)
    summed = {ident: np.zeros(DIM) for ident in whole.lookups["user"].ids_M.tolist()}
    for part, part_grads_MD in zip(parts, row_grads, strict=True):
        for ident, gradient in zip(part.lookups["user"].ids_M.tolist(), part_grads_MD, strict=True):
            summed[ident] += gradient
    np.testing.assert_allclose(list(summed.values()), row_grads_MD, rtol=1e-4, atol=1e-6)


def test_trainers_with_the_same_sum_take_the_same_step():
    """Whatever share a trainer had, it ends with the weights of the others, to the bit."""
    total = torch.linspace(-1, 1, sum(weight.size for weight in program().weights().values()))
    ended = []
    for share in shares(ROWS, NUM_ITEMS, tables=("user",), num_trainers=3):
        trained = program(lambda flat: lambda: flat.copy_(total))
        trained.backward(share, table_rows(share))
        trained.update()
        ended.append({name: weight.tobytes() for name, weight in trained.weights().items()})

    assert ended[0] == ended[1] == ended[2]


def test_a_share_without_tokens_takes_part_with_zero_gradients():
    (features,) = shares([[4], [7]], NUM_ITEMS, tables=("user",))

    gradients = program().backward(features, table_rows(features))

    assert gradients.loss_sum == 0.0
    assert gradients.row_grads["user"].tolist() == np.zeros((2, DIM)).tolist()


def test_loaded_state_continues_to_the_same_bits():
    whole, first = program(), program()
    train(whole, range(6))
    train(first, range(3))
    second = program()
    second.load(first.weights(), first.optimizer_state())

    train(second, range(3, 6))

    for name, weight in whole.weights().items():
        assert second.weights()[name].tobytes() == weight.tobytes(), name
    for name, value in whole.optimizer_state().items():
        assert second.optimizer_state()[name].tobytes() == value.tobytes(), name


def test_saved_state_is_a_copy():
    trained = program()
    before = trained.weights()
    kept = {name: weight.copy() for name, weight in before.items()}

    train(trained, range(1))

    assert all((before[name] == kept[name]).all() for name in kept)
    assert any((trained.weights()[name] != kept[name]).any() for name in kept)


def test_weights_that_do_not_fit_are_named():
    weights = program().weights()

    with pytest.raises(ValueError, match=r"'items_ID'.*only one of the snapshot and the model"):
        program().load({name: weight for name, weight in weights.items() if name != "items_ID"}, None)
    with pytest.raises(ValueError, match="'extra'"):
        program().load({**weights, "extra": np.zeros(1)}, None)
    with pytest.raises(ValueError, match=r"'items_ID' has shape \(2, 8\).*\(9, 8\) in the model"):
        program().load({**weights, "items_ID": np.zeros((2, 8), dtype=np.float32)}, None)
    with pytest.raises(ValueError, match="blocks"):
        program(num_layers=2).load(weights, None)


def test_a_loss_that_is_not_finite_stops_training_at_its_step():
    diverged = program()
    weights = diverged.weights()
    diverged.load({**weights, "items_ID": np.full_like(weights["items_ID"], np.nan)}, None)
    (features,) = shares(ROWS, NUM_ITEMS, tables=("user",), step=12)

    with pytest.raises(FloatingPointError, match=r"step 12: the loss is nan"):
        diverged.backward(features, table_rows(features))


def steep(trained: SequenceProgram, place: str, slope: float) -> SequenceProgram:
    """The program with a finite loss, but gradients times `slope` at a weight or table."""
    if place in dict(trained.model.named_parameters()):
        trained.model.get_parameter(place).register_hook(lambda gradient: gradient * slope)
        return trained
    loss = trained.model.loss

    def loss_with_steep_rows(batch):
        batch.rows[place].register_hook(lambda gradient: gradient * slope)
        return loss(batch) + batch.rows[place].sum()

    trained.model.loss = loss_with_steep_rows
    return trained


@pytest.mark.parametrize("slope", [np.inf, np.nan, 1e30])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_dense_gradient_that_is_not_finite_is_refused_before_anything_is_sent(slope, max_grad_norm):
    """Clipping by an infinite norm would silently make every gradient zero."""
    settings = dataclasses.replace(SETTINGS, max_grad_norm=max_grad_norm)
    model = DenseNextItemModel(backbone(), CrossEntropy(), NUM_ITEMS, DIM)
    trained = steep(SequenceProgram(model, settings, CPU, seed=5), "items_ID", slope)
    before = trained.weights()
    (features,) = shares(ROWS, NUM_ITEMS, tables=("user",), step=12)

    with pytest.raises(
        FloatingPointError, match=r"step 12: the gradient of 'items_ID' has a norm of (inf|nan)"
    ):
        trained.backward(features, table_rows(features))

    assert all((weight == before[name]).all() for name, weight in trained.weights().items())


def test_a_row_gradient_that_is_not_finite_is_refused_before_it_is_sent():
    (features,) = shares(ROWS, NUM_ITEMS, tables=("user",), step=3)

    with pytest.raises(
        FloatingPointError, match=r"step 3: the gradient of table 'user' has .* from id -?\d+"
    ):
        steep(program(), "user", np.inf).backward(features, table_rows(features))


def test_a_sum_over_trainers_that_is_not_finite_changes_no_weight():
    trained = program(lambda flat: lambda: flat[0].fill_(np.inf))
    before = trained.weights()
    (features,) = shares(ROWS, NUM_ITEMS, tables=("user",), step=7)
    trained.backward(features, table_rows(features))

    with pytest.raises(FloatingPointError, match=r"step 7: the gradient of '[\w.]+' has a norm of inf"):
        trained.update()

    assert all((weight == before[name]).all() for name, weight in trained.weights().items())


def test_ranking_does_not_drop_out_and_leaves_training_as_it_was():
    trained, other = program(dropout=0.9), program(dropout=0.0)
    features = histories(ROWS, NUM_ITEMS, tables=("user",))

    ranked = trained.recommend(features, table_rows(features), 4, None)

    expected = other.recommend(features, table_rows(features), 4, None)
    assert ranked.items_BK.tolist() == expected.items_BK.tolist()
    untouched = program(dropout=0.9)
    assert train(trained, range(2)) == train(untouched, range(2))


@pytest.mark.parametrize("rows", [[[], [3, 1], []], [[], []], []])
def test_rows_without_history_get_no_items(rows):
    features = histories(rows, NUM_ITEMS, tables=("user",))
    values = {"user": np.zeros((len(features.lookups["user"].ids_M), DIM), dtype=np.float32)}

    ranked = program().recommend(features, values, 3, None)

    assert ranked.items_BK.shape == ranked.scores_BK.shape == (len(rows), 3)
    for history, items_K, scores_K in zip(rows, ranked.items_BK, ranked.scores_BK, strict=True):
        assert (items_K >= 0).all() == (scores_K > -np.inf).all() == bool(history)


def test_the_catalog_is_taken_as_arrays():
    model = SparseNextItemModel(backbone(), SampledSoftmax(torch.zeros(NUM_ITEMS)))
    sampled = SequenceProgram(model, SETTINGS, CPU, seed=0)
    features = histories([[1, 2]], NUM_ITEMS, tables=("item",))

    assert sampled.table_of_catalog == "item"
    asked = []
    sampled.take_catalog(
        np.arange(NUM_ITEMS), lambda ids_M: asked.append(ids_M) or np.eye(NUM_ITEMS, DIM, dtype=np.float32)
    )
    assert asked[0].tolist() == list(range(NUM_ITEMS))
    assert sampled.recommend(features, table_rows(features), NUM_ITEMS, None).items_BK.shape == (1, NUM_ITEMS)


@pytest.mark.parametrize(
    "compute", [PLAIN, ComputeSettings(precision="bfloat16", weights="bfloat16_with_master")]
)
def test_frozen_weights_stay_as_they_are_and_have_no_optimizer_state(compute):
    """Weight decay would shrink them: the optimizer is not given them."""
    decaying = dataclasses.replace(SETTINGS, weight_decay=0.5)

    def frozen_program() -> SequenceProgram:
        torch.manual_seed(0)
        model = DenseNextItemModel(backbone(0.3, 1), CrossEntropy(), NUM_ITEMS, DIM)
        for parameter in model.backbone.parameters():
            parameter.requires_grad_(False)
        return SequenceProgram(model, decaying, CPU, seed=5, compute=compute)

    trained = frozen_program()
    before = trained.weights()

    losses = train(trained, range(6))

    after, state = trained.weights(), trained.optimizer_state()
    assert losses[-1] < losses[0]
    assert {name for name in after if after[name].tobytes() != before[name].tobytes()} == {"items_ID"}
    assert {name.rpartition("/")[0] for name in state} == {"", "items_ID"}
    second = frozen_program()
    second.load(after, state)
    assert train(second, range(6, 8)) == train(trained, range(6, 8))


def test_the_learning_rate_follows_its_schedule():
    """Adam's first step moves a weight by the learning rate, or less where the gradient is tiny."""

    def moved(schedule: RateSchedule) -> float:
        torch.manual_seed(0)
        settings = DenseOptimizerSettings(0.1, 0.0, schedule, max_grad_norm=None, fused=True)
        tested = SequenceProgram(
            DenseNextItemModel(backbone(), CrossEntropy(), NUM_ITEMS, DIM), settings, CPU, seed=0
        )
        before = tested.weights()["items_ID"]
        (features,) = shares(ROWS, NUM_ITEMS)
        tested.backward(features, {})
        tested.update()
        return float(np.abs(tested.weights()["items_ID"] - before).max())

    assert moved(RateSchedule()) == pytest.approx(0.1, rel=1e-3)
    assert moved(RateSchedule(warmup_steps=4)) == pytest.approx(0.025, rel=1e-3)


def test_a_gradient_norm_limit_bounds_the_step():
    def moved(max_grad_norm):
        settings = DenseOptimizerSettings(1.0, 0.0, RateSchedule(), max_grad_norm, fused=True)
        torch.manual_seed(0)
        tested = SequenceProgram(
            DenseNextItemModel(backbone(), CrossEntropy(), NUM_ITEMS, DIM), settings, CPU, seed=0
        )
        (features,) = shares(ROWS, NUM_ITEMS, tables=())
        tested.backward(features, {})
        tested.update()
        moments = [value for name, value in tested.optimizer_state().items() if name.endswith("/exp_avg")]
        # After one step the first moment is a tenth of the gradient that was applied.
        return 10 * np.sqrt(sum((moment**2).sum() for moment in moments))

    unbounded = moved(None)

    assert moved(unbounded / 2) == pytest.approx(unbounded / 2, rel=1e-3)
    assert moved(2 * unbounded) == pytest.approx(unbounded, rel=1e-3)


@pytest.mark.parametrize("decayed", ["all", "matrices", "linear"])
def test_weight_decay_reaches_the_weights_that_it_is_meant_for(decayed):
    """Without gradients, a weight shrinks by the decay alone."""
    tested = program(settings=dataclasses.replace(SETTINGS, weight_decay=0.5, decayed=decayed))
    module = tested._module
    module.rows = torch.nn.Embedding(4, DIM)
    tested._parameters, tested._optimizer = tested._parameters_and_optimizer()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    before = tested.weights()

    tested.update()

    after = tested.weights()
    shrunk = {name for name in before if not np.array_equal(before[name], after[name])}
    matrices = {name for name, parameter in module.named_parameters() if parameter.ndim > 1}
    expected = {"all": set(before), "matrices": matrices, "linear": matrices - {"rows.weight"}}
    assert shrunk == expected[decayed]

"""Precision, micro-batches, compiling and counting: the same training, done otherwise."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.linear_cross_entropy import linear_cross_entropy
from rayrec.models.program.compiled_parts import compile_parts, explained
from rayrec.models.program.utilization import Utilization
from rayrec.models.sequence.sequence_program import SequenceProgram, flops_of
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.errors import InputError
from tests.helpers.examples import cases
from tests.models.ctr.programs import RANKING, ranking_program
from tests.models.keras import impressions
from tests.models.networks import CPU, DIM, table_rows, tensor_batch
from tests.models.recipes import (
    MODELS,
    NUM_ITEMS,
    ONE_OF_EACH_KIND,
    ROWS,
    SETTINGS,
    features_of,
    model_of,
)

NUM_PIECES = (2, 3, 6)
"""Three pieces have two rows each, six have one."""
CUT = {(name, 3) for name in (*ONE_OF_EACH_KIND, "causal_lm", "gnn", "encoder_decoder, instructed")}
CUT |= {("sampled", 2), ("lazy_decoder, instructed", 6)}


def program(name: str, compute: ComputeSettings = PLAIN) -> SequenceProgram:
    return SequenceProgram(model_of(name), SETTINGS, CPU, seed=5, compute=compute)


def train(trained: SequenceProgram, name: str, num_steps: int):
    """Losses per target, and the row gradients of the last step."""
    losses = []
    for step in range(num_steps):
        (features,) = features_of(name, step)
        gradients = trained.backward(features, table_rows(features))
        losses.append(gradients.loss_sum / features.num_targets)
        trained.update()
    return losses, gradients.row_grads


# A language model of this size learns the batches by heart, and small differences grow: see
# test_causal_lm_recipes.
@pytest.mark.slow
@pytest.mark.parametrize("name", cases((name for name in MODELS if name != "causal_lm"), ONE_OF_EACH_KIND))
def test_bfloat16_trains_about_as_float32_with_float32_weights_and_gradients(name):
    short = program(name, ComputeSettings(precision="bfloat16"))

    _, row_grads = train(short, name, 1)
    _, expected_grads = train(whole := program(name), name, 1)
    losses, expected = train(short, name, 6)[0], train(whole, name, 6)[0]

    # Which experts a token goes through turns on single bits.
    np.testing.assert_allclose(losses, expected, rtol=0.05 if "experts" in MODELS[name] else 0.02)
    assert losses != expected
    assert all(weight.dtype == np.float32 for weight in short.weights().values())
    state = short.optimizer_state()
    assert all(value.dtype == np.float32 for key, value in state.items() if "exp_avg" in key)
    assert all(grads_MD.dtype == np.float32 for grads_MD in row_grads.values())
    for table, grads_MD in row_grads.items():
        assert np.abs(grads_MD - expected_grads[table]).max() < 0.1 * np.abs(expected_grads[table]).max()


def test_the_fused_loss_in_bfloat16_sums_in_float32():
    context_ND = torch.randn(64, 16, requires_grad=True)
    items_ID = torch.randn(300, 16, requires_grad=True)
    targets_N = torch.randint(300, (64,))
    exact = torch.autograd.grad(linear_cross_entropy(context_ND, items_ID, targets_N), [context_ND, items_ID])

    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(context_ND, items_ID, targets_N)
        from_short = linear_cross_entropy(context_ND.bfloat16(), items_ID, targets_N)
    gradients = torch.autograd.grad(loss, [context_ND, items_ID])

    assert loss.dtype == from_short.dtype == torch.float32
    assert loss.item() == pytest.approx(
        linear_cross_entropy(context_ND, items_ID, targets_N).item(), rel=1e-3
    )
    for gradient, expected in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("name", "num_pieces"),
    cases(itertools.product(MODELS, NUM_PIECES), CUT),
)
def test_micro_batches_add_up_to_the_batch(name, num_pieces):
    """Dropout included: masks are keyed by row."""
    in_pieces = program(name, ComputeSettings(micro_batches=num_pieces))

    losses, row_grads = train(in_pieces, name, 2)

    expected, expected_grads = train(program(name), name, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for table, grads_MD in row_grads.items():
        np.testing.assert_allclose(grads_MD, expected_grads[table], rtol=1e-3, atol=1e-6)


def test_micro_batches_hold_the_activations_of_one_piece():
    """Measured by what autograd keeps for backward at any one time."""

    def most_kept(compute: ComputeSettings) -> int:
        kept = most = 0

        def keep(tensor):
            nonlocal kept, most
            kept += tensor.nbytes
            most = max(most, kept)
            return tensor

        def give_back(tensor):
            nonlocal kept
            kept -= tensor.nbytes
            return tensor

        (features,) = features_of("lazy_decoder", rows=ROWS * 16)
        trained = program("lazy_decoder", compute)
        with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
            trained.backward(features, table_rows(features))
        return most

    assert most_kept(ComputeSettings(micro_batches=8)) < 0.25 * most_kept(PLAIN)


def test_every_field_of_a_batch_is_cut():
    """Who adds one has to say in `some_rows` and `stand_in` what becomes of it."""
    assert [field.name for field in dataclasses.fields(TensorBatch)] == [
        "layout",
        "keys_N",
        "items_N",
        "targets_N",
        "negatives_S",
        "inverse",
        "rows",
        "negatives_NK",
        "times_N",
        "labels",
        "target_labels",
        "instruction",
        "neighbors_NJ",
        "neighbor_weights_NJ",
        "old_chunks",
        "paths",
        "prompts",
    ]


def test_a_table_that_nobody_knows_how_to_cut_is_refused():
    (features,) = features_of("sampled")
    batch = tensor_batch(features)
    batch.inverse["price"] = batch.inverse["user"]

    with pytest.raises(ValueError, match=r"table 'price' cannot be cut.*micro_batches to 1"):
        batch.some_rows(slice(0, 2))


@pytest.mark.parametrize("name", cases(MODELS, ONE_OF_EACH_KIND))
def test_a_stand_in_asks_for_every_weight_and_changes_nothing(name):
    (features,) = features_of(name)
    batch = tensor_batch(features, training=True)
    model = model_of(name)

    (model.loss(batch.stand_in()) * 0.0).backward()

    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())
    assert all(rows_MD.grad is None or not rows_MD.grad.any() for rows_MD in batch.rows.values())


@pytest.mark.parametrize(
    "name",
    [
        "sasrec",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "bsarec",
                "hstu, dense",
                "light_decoder",
                "encoder_decoder",
                "encoder_decoder, instructed",
            )
        ),
    ],
)
def test_compiled_parts_train_as_the_others_do_and_rank_without(name):
    """With a backend that runs the traced graph as it is: compiling proper takes long."""
    graphs = []

    def run_as_traced(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = program(name)
    assert compile_parts(compiled.model, run_as_traced) > 0

    losses, _ = train(compiled, name, 3)

    assert graphs
    np.testing.assert_allclose(losses, train(program(name), name, 3)[0], rtol=1e-5)
    num_graphs = len(graphs)
    (features,) = features_of(name)
    compiled.recommend(features, table_rows(features), 3, None)
    assert len(graphs) == num_graphs


@pytest.mark.parametrize("name", cases(RANKING, ["din with prelu"]))
def test_compiled_ranking_models_train_as_the_others_do_and_score_without(name):
    """As above, with traced graphs."""
    graphs = []

    def run_as_traced(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled, plain = ranking_program(name), ranking_program(name)
    assert compile_parts(compiled.model, run_as_traced) > 0

    for step in range(3):
        features = impressions.batch(12 + step, step)  # the number of rows is left open
        rows = impressions.table_rows(features)
        ours, expected = compiled.backward(features, rows), plain.backward(features, rows)
        assert ours.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
        for trained in (compiled, plain):
            trained.update()

    num_graphs = len(graphs)
    assert num_graphs
    np.testing.assert_allclose(compiled.predict(features, rows), plain.predict(features, rows), rtol=1e-5)
    assert len(graphs) == num_graphs


def test_what_cannot_be_compiled_is_explained():
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler found")

    torch._dynamo.reset()
    compiled = program("sasrec")
    compile_parts(compiled.model, broken)

    with (
        pytest.raises(InputError, match=r"training.compile: .*no C\+\+ compiler found.*set training.compile"),
        explained(),
    ):
        train(compiled, "sasrec", 1)


def test_model_flops_are_those_of_a_hand_count():
    """SASRec with a full softmax: Linear layers, causal attention by visible pairs, and the fused loss."""
    (features,) = features_of("sasrec")
    num_tokens = len(features.items_N)
    linear = 2 * num_tokens * (DIM * 3 * DIM + DIM * DIM + 2 * DIM * 16)
    lengths = np.diff(features.offsets_B1)
    attention = 2 * 2 * DIM * int((lengths * (lengths + 1) // 2).sum())
    softmax = 2 * num_tokens * NUM_ITEMS * DIM

    counted = flops_of(model_of("sasrec"), CPU).of(features, {})

    # Backward multiplies twice as often as forward.
    assert counted == 3 * (2 * (linear + attention) + softmax)


def test_model_flops_do_not_depend_on_who_attends(monkeypatch):
    from rayrec.models.attention import choice

    (features,) = features_of("lazy_decoder")
    dims = {"user": DIM}
    counted = flops_of(model_of("lazy_decoder"), CPU).of(features, dims)
    monkeypatch.setattr(choice, "by_rule", lambda call: choice.BACKENDS["reference"])

    assert flops_of(model_of("lazy_decoder"), CPU).of(features, dims) == counted > 0


@pytest.mark.parametrize("name", cases(MODELS, ONE_OF_EACH_KIND))
def test_counting_leaves_the_model_and_the_rows_alone(name):
    model = model_of(name)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    (features,) = features_of(name)
    flops = flops_of(model, CPU)
    dims = dict.fromkeys(features.lookups, DIM)

    assert flops.of(features, dims) > 0

    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_batches_of_a_class_are_counted_once_and_scaled_by_tokens():
    flops = flops_of(model_of("sasrec"), CPU)
    (larger,), (smaller,) = (
        features_of("sasrec", rows=[[1, 2, 3]] * 8),
        features_of("sasrec", rows=[[1, 2, 3]] * 7),
    )

    assert flops.of(larger, {}) * 7 == pytest.approx(flops.of(smaller, {}) * 8)
    assert len(flops._per_token) == 1
    assert flops.of(features_of("sasrec", rows=[[1]])[0], {}) == 0.0


def test_the_best_matrix_rate_counts():
    account = Utilization(matrix_rate=100.0)
    for rate in (50.0, 200.0, 150.0):
        account.measured(rate)
    account.add(100.0)

    assert account.since_last(1.0) == 0.5


def test_utilization_is_that_of_the_time_since_it_was_asked():
    account = Utilization(matrix_rate=100.0)
    account.add(50.0)
    assert account.since_last(2.0) == 0.25
    account.add(300.0)
    assert account.since_last(7.0) == 0.6
    assert account.since_last(7.0) == 0.0
    assert account.total_flops == 350.0

"""What holds of every ranking network."""

import dataclasses

import pytest
import torch

from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema
from tests.models.ctr.batches import CONFIGS, LENGTHS, SCHEMA, impressions, model, some_rows

every_network = pytest.mark.parametrize("name", CONFIGS)
NONE = {"clicked": (0, 0, 0, 0), "tags": (0, 0, 0, 0)}


def gradients(network, batch: ImpressionTensors) -> list[torch.Tensor]:
    """Of the loss, by every weight and the rows."""
    leaves = [*network.parameters(), batch.rows_MD]
    found = torch.autograd.grad(network.loss(batch), leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found, strict=True)]


@every_network
def test_losses_and_gradients_of_parts_add_up(name):
    network = model(name, dropout=0.3).train()
    batch = impressions(network.row_dim)
    parts = [some_rows(batch, slice(0, 1)), some_rows(batch, slice(1, 4))]

    torch.testing.assert_close(sum(network.loss(part) for part in parts), network.loss(batch))
    summed = [sum(of_parts) for of_parts in zip(*(gradients(network, part) for part in parts), strict=True)]
    torch.testing.assert_close(summed, gradients(network, batch))


@every_network
def test_gradients_are_those_of_the_loss(name):
    network = model(name)
    batch = impressions(network.row_dim)

    def loss(rows_MD):
        return network.loss(dataclasses.replace(batch, rows={FEATURE_TABLE: rows_MD}))

    assert torch.autograd.gradcheck(loss, batch.rows_MD)


@every_network
def test_gradients_reach_every_weight_and_every_row_that_was_read(name):
    network = model(name)
    batch = impressions(network.row_dim, num_ids=40)
    read = torch.cat([batch.inverse_BC.flatten(), *(ids.inverse_N for ids in batch.lists.values())]).unique()

    *of_weights, of_rows_MD = gradients(network, batch)

    assert all(grad.abs().sum() > 0 for grad in of_weights)
    assert of_rows_MD.abs().sum(1).nonzero().flatten().tolist() == read.tolist()


@every_network
@pytest.mark.parametrize(
    "schema",
    [
        dataclasses.replace(SCHEMA, numbers=()),
        dataclasses.replace(SCHEMA, lists={"clicked": "item"}),
        dataclasses.replace(SCHEMA, labels=("click",)),
        ImpressionSchema(labels=("click",), ids={"item": "item"}, lists={"clicked": "item"}),
    ],
    ids=["no numbers", "one list", "one task", "little"],
)
def test_networks_make_do_with_what_there_is(name, schema):
    network = model(name, schema)
    batch = impressions(network.row_dim, schema)

    assert network.logits(batch).shape == (4, len(schema.labels))
    assert all(grad.isfinite().all() for grad in gradients(network, batch))


@pytest.mark.parametrize("name", [name for name in CONFIGS if "din" not in name])
@pytest.mark.parametrize(
    "schema",
    [
        ImpressionSchema(labels=("click",), numbers=("price",)),
        ImpressionSchema(labels=("click",), ids={"item": "item"}),
        ImpressionSchema(labels=("click",), lists={"tags": "tag"}),
    ],
    ids=["a number", "an id", "a list"],
)
def test_one_feature_is_enough(name, schema):
    network = model(name, schema)
    batch = impressions(network.row_dim, schema)

    assert any(grad.abs().sum() > 0 for grad in gradients(network, batch))
    assert len(network.logits(batch).unique()) > 1


@every_network
def test_empty_lists_have_finite_logits_and_gradients(name):
    network = model(name)
    batch = impressions(network.row_dim, lengths=NONE)

    assert network.logits(batch).isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(network, batch))


@every_network
def test_no_impression_at_all_adds_nothing(name):
    network = model(name)
    batch = some_rows(impressions(network.row_dim), slice(2, 2))

    assert network.logits(batch).shape == (0, 2)
    assert all((grad == 0).all() for grad in gradients(network, batch))


@every_network
def test_unknown_labels_add_nothing(name):
    network = model(name)
    batch = impressions(network.row_dim)
    known = network.loss(batch)
    unknown = dataclasses.replace(batch, labels_BT=torch.full_like(batch.labels_BT, torch.nan))

    probs_BT = network.predict(batch)
    by_hand = sum(
        -torch.log(probs_BT[row, task] if label else 1 - probs_BT[row, task])
        for row, labels in enumerate(batch.labels_BT.tolist())
        for task, label in enumerate(labels)
        if label == label
    )
    torch.testing.assert_close(known, by_hand)
    assert network.loss(unknown).item() == 0.0
    assert all((grad == 0).all() for grad in gradients(network, unknown))


@every_network
def test_rows_to_be_scored_have_no_labels(name):
    network = model(name)
    batch = impressions(network.row_dim)
    to_score = dataclasses.replace(batch, labels_BT=batch.labels_BT[:, :0])

    assert torch.equal(network.predict(to_score), network.predict(batch))
    with pytest.raises(AssertionError, match="no labels"):
        network.loss(to_score)


@every_network
def test_dropout_hangs_on_keys_alone(name):
    network = model(name, dropout=0.5).train()
    batch = impressions(network.row_dim)
    state = torch.random.get_rng_state()

    first, second = network.logits(batch), network.logits(batch)
    others = network.logits(dataclasses.replace(batch, keys_B=batch.keys_B + 1))

    assert torch.equal(first, second)
    assert not torch.equal(first, others)
    assert torch.equal(network.eval().logits(batch), network.logits(batch))
    assert torch.equal(torch.random.get_rng_state(), state)


@every_network
def test_networks_train_under_autocast(name):
    network = model(name).float()
    batch = impressions(network.row_dim)
    rows = {FEATURE_TABLE: batch.rows_MD.detach().float().requires_grad_()}
    batch = dataclasses.replace(batch, numbers_BF=batch.numbers_BF.float(), rows=rows)
    exact = network.loss(batch)

    with torch.autocast("cpu", torch.bfloat16):
        loss = network.loss(batch)

    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert all(grad.isfinite().all() for grad in gradients(network, batch))
    loss.backward()


@pytest.mark.parametrize("name", ["dlrm", "deepfm", "dcn_stacked", "dcn_parallel", "din_dice", "mmoe"])
def test_networks_learn_a_rule_of_two_features(name):
    """A click if and only if the item's and the brand's place are both even or both odd."""
    num_rows = 128
    lengths = dict.fromkeys(LENGTHS, (1,) * num_rows)
    wide = {"tower_dims": (8,)} if name == "mmoe" else {}
    network = model(name, hidden_dims=(16, 8), **wide).float()
    batch = impressions(network.row_dim, lengths=lengths, num_rows=num_rows, num_ids=6)
    is_click_B = (batch.inverse_BC[:, 1] + batch.inverse_BC[:, 2]) % 2 == 0
    rows_MD = batch.rows_MD.detach().float().requires_grad_()
    batch = dataclasses.replace(
        batch,
        numbers_BF=batch.numbers_BF.float(),
        labels_BT=torch.stack([is_click_B, ~is_click_B], dim=1).float(),
        rows={FEATURE_TABLE: rows_MD},
    )
    optimizer = torch.optim.Adam([*network.parameters(), rows_MD], lr=0.05)

    for _ in range(60):
        optimizer.zero_grad()
        (network.loss(batch) / num_rows).backward()
        optimizer.step()

    correct = (network.predict(batch) > 0.5) == (batch.labels_BT > 0.5)
    assert correct.float().mean() > 0.95

"""Each network against its equation, impression by impression."""

import pytest
import torch

from rayrec.models.ctr.dcn_v2 import DcnV2
from rayrec.models.ctr.din import Dice, Din
from rayrec.models.ctr.dlrm import PairwiseProducts
from rayrec.models.ctr.mlp import Mlp
from tests.models.ctr.batches import SCHEMA, fields, impressions, list_rows, model


def mlp(network: Mlp, x: torch.Tensor, activation=torch.relu) -> torch.Tensor:
    for linear in network.linears:
        x = activation(linear.weight @ x + linear.bias)
    return x


def check(network, by_hand) -> None:
    """`by_hand` gives the logits of one impression."""
    batch = impressions(network.row_dim)
    expected = torch.stack([by_hand(batch, row) for row in range(len(batch.keys_B))])
    torch.testing.assert_close(network.logits(batch), expected, rtol=1e-10, atol=1e-10)


def test_dlrm():
    network = model("dlrm")

    def by_hand(batch, row):
        numbers = mlp(network.bottom, batch.numbers_BF[row])
        vectors = [numbers, *fields(batch, row)]
        products = [vectors[k] @ vectors[m] for k in range(6) for m in range(k + 1, 6)]
        return network.head(mlp(network.top, torch.cat([numbers, torch.stack(products)])))

    check(network, by_hand)


def test_products_of_pairs_have_the_gradients_of_their_equation():
    x_BKD = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    assert torch.autograd.gradcheck(PairwiseProducts(4), x_BKD.requires_grad_())


def test_deepfm():
    network = model("deepfm")

    def by_hand(batch, row):
        numbers = [x * vector for x, vector in zip(batch.numbers_BF[row], network.numbers_FE, strict=True)]
        rows = [*numbers, *fields(batch, row)]
        vectors = [vector[:-1] for vector in rows]
        first = sum(vector[-1] for vector in rows)
        second = sum(vectors[k] @ vectors[m] for k in range(7) for m in range(k + 1, 7))
        deep = network.head(mlp(network.mlp, torch.cat(vectors)))
        return deep + network.factors_T * (first + second)

    check(network, by_hand)


@pytest.mark.parametrize("name", ["dcn_stacked", "dcn_parallel"])
def test_dcn_v2(name):
    network = model(name)
    assert isinstance(network, DcnV2)

    def by_hand(batch, row):
        first = x = torch.cat([batch.numbers_BF[row], *fields(batch, row)])
        for cross in network.crosses:
            whole = cross.linear.weight
            if name == "dcn_parallel":  # the one of a low rank
                assert cross.down.weight.shape == (2, len(first))
                whole = whole @ cross.down.weight
            x = first * (whole @ x + cross.linear.bias) + x
        if name == "dcn_stacked":
            return network.head(mlp(network.mlp, x))
        return network.head(torch.cat([x, mlp(network.mlp, first)]))

    check(network, by_hand)


def dice(module: Dice, x: torch.Tensor) -> torch.Tensor:
    p = 1 / (1 + torch.exp(-(x - module.center_H) * module.slope_H))
    return p * x + (1 - p) * module.alpha_H * x


def prelu(module: torch.nn.PReLU, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, module.weight * x)


@pytest.mark.parametrize(("name", "activation"), [("din_dice", dice), ("din_prelu", prelu)])
def test_din(name, activation):
    network = model(name)
    assert isinstance(network, Din)
    (unit,) = network.units

    def weight_of(element, target):
        x = torch.cat([element, element * target, target])
        x = activation(unit.first_activation, unit.first.weight @ x + unit.first.bias)
        for linear, module in zip(unit.others[::2], unit.others[1::2], strict=True):
            x = activation(module, linear.weight @ x + linear.bias)
        return unit.head.weight[0] @ x + unit.head.bias[0]

    def by_hand(batch, row):
        user, item, brand, _, tags = fields(batch, row)
        elements = list_rows(batch, "clicked", row)
        interest = sum((weight_of(element, item) * element for element in elements), torch.zeros(3).double())
        x = torch.cat([batch.numbers_BF[row], user, item, brand, tags, interest])
        for linear, module in zip(network.mlp.linears, network.mlp.activations, strict=True):
            x = activation(module, linear.weight @ x + linear.bias)
        return network.head(x)

    check(network, by_hand)


def test_mmoe():
    network = model("mmoe")

    def by_hand(batch, row):
        x = torch.cat([batch.numbers_BF[row], *fields(batch, row)])
        experts = []
        for expert in range(3):
            hidden = x
            for weights, biases in zip(network.experts.weights, network.experts.biases, strict=True):
                hidden = torch.relu(weights[expert] @ hidden + biases[expert])
            experts.append(hidden)
        logits = []
        for task in range(len(SCHEMA.labels)):
            gate = (network.gates.weight[3 * task : 3 * task + 3] @ x).softmax(0)
            mixed = sum(share * hidden for share, hidden in zip(gate, experts, strict=True))
            logits.append(network.heads[task](mlp(network.towers[task], mixed)))
        return torch.cat(logits)

    check(network, by_hand)

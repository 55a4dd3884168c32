import math

import pytest
import torch

from rayrec.models.ctr.losses import LabelLoss

NAN = math.nan


def test_weights_of_labels_and_of_positives_multiply():
    """Probabilities 0.75 and 0.2: the odds of a logit are p / (1 - p)."""
    logits_BT = torch.tensor([[math.log(3.0), math.log(0.25)]] * 2)
    labels_BT = torch.tensor([[1.0, 1.0], [0.0, 0.0]])

    loss = LabelLoss([1.0, 0.5], [1.0, 10.0])(logits_BT, labels_BT)

    of_first = -math.log(0.75) - math.log(0.25)
    of_second = -10 * math.log(0.2) - math.log(0.8)
    assert loss.item() == pytest.approx(of_first + 0.5 * of_second, rel=1e-6)


def test_unknown_labels_have_no_loss_and_no_gradient():
    logits_BT = torch.tensor([[2.0, 1.0], [-3.0, 0.5]], requires_grad=True)
    labels_BT = torch.tensor([[NAN, 1.0], [0.0, NAN]])

    loss = LabelLoss([1.0, 1.0], [1.0, 1.0])(logits_BT, labels_BT)
    loss.backward()

    assert loss.item() == pytest.approx(math.log1p(math.exp(-1.0)) + math.log1p(math.exp(-3.0)), rel=1e-6)
    assert (logits_BT.grad == 0).tolist() == [[True, False], [False, True]]


def test_extreme_logits_have_finite_losses():
    loss = LabelLoss([1.0], [1.0])(torch.tensor([[200.0], [-200.0]]), torch.tensor([[0.0], [1.0]]))

    assert loss.item() == pytest.approx(400.0)


def test_sums_are_not_made_in_half_precision():
    loss = LabelLoss([1.0], [1.0])(torch.zeros(4096, 1, dtype=torch.bfloat16), torch.ones(4096, 1))

    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4096 * math.log(2.0), rel=1e-5)

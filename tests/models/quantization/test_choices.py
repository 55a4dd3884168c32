"""What the divergence of a whole network decides: never worse than plain rounding, and layers in float32."""

import pytest
import torch
from torch import nn

from rayrec.models.quantization.linear import QuantizedLinear, with_quantized_layers
from rayrec.models.quantization.network import QuantizationPlan, quantize
from rayrec.models.quantization.observers import observed
from tests.models.quantization.layers import rows
from tests.models.quantization.test_network import Block, block, error_of


class Two(nn.Module):
    """A block that matters, and one whose outputs hardly do."""

    def __init__(self, share=0.01):
        super().__init__()
        self.first, self.second, self._share = block(1), block(2), share

    def forward(self, x):
        return self.first(x) + self._share * self.second(x)


def made(model, plan, x, divergence=None):
    with observed(model) as observers:
        model(x)
    return quantize(model, observers, plan, divergence=divergence)


def error_on(model, reference, x):
    return lambda: error_of(model, reference, x)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("outliers", [False, True])
def test_the_outcome_is_no_worse_than_plain_rounding_or_layer_by_layer(scheme, outliers):
    reference, x = block(outliers=outliers), rows(200, 64)
    errors = []
    for plan, measured in (
        (QuantizationPlan(scheme, scales=False), False),
        (QuantizationPlan(scheme), False),
        (QuantizationPlan(scheme), True),
    ):
        model = block(outliers=outliers)
        made(model, plan, x, error_on(model, reference, x) if measured else None)
        errors.append(error_of(model, reference, x))

    assert errors[2] <= min(errors[:2])


@torch.no_grad()
def test_plain_rounding_stays_where_scales_only_move_the_answers_away():
    plain, model, x = block(outliers=True), block(outliers=True), rows(200, 64)
    trained = model.norm.weight.clone()
    made(plain, QuantizationPlan("w4a16", scales=False), x)

    made(model, QuantizationPlan("w4a16"), x, lambda: float((model.norm.weight - trained).abs().sum()))

    assert torch.equal(model.norm.weight, trained)
    assert torch.equal(model(x), plain(x))


@torch.no_grad()
def test_layers_that_matter_most_stay_in_float_until_the_answers_are_near_enough():
    reference, model, x = Two(), Two(), rows(200, 64)
    far = error_on(model, reference, x)

    settings = made(model, QuantizationPlan("w8a8", most_divergence=1e-9), x, far)

    assert set(settings.modules) < {
        f"{name}.{side}" for name in ("first", "second") for side in ("left", "right")
    }
    assert {"second.left", "second.right"} <= set(settings.modules)
    in_float = [name for name in ("first.left", "first.right") if name not in settings.modules]
    assert len(in_float) == 1  # a third of the weights at most
    assert type(model.get_submodule(in_float[0])) is nn.Linear
    again = with_quantized_layers(Two(), settings)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


@torch.no_grad()
def test_nothing_stays_in_float_where_the_answers_are_near_enough():
    reference, model, x = Two(), Two(), rows(200, 64)

    settings = made(model, QuantizationPlan("w8a8", most_divergence=1.0), x, error_on(model, reference, x))

    assert len(settings.modules) == 4
    assert all(isinstance(model.get_submodule(name), QuantizedLinear) for name in settings.modules)


@torch.no_grad()
def test_a_layer_in_float_reads_a_norm_whose_scales_have_moved():
    model, x = block(outliers=True), rows(200, 64)
    expected, answers = Block.forward(model, x), []

    def divergence():
        answers.append(model(x))
        return float((answers[-1] - expected).norm())

    settings = made(model, QuantizationPlan("w8a8", most_divergence=0.0), x, divergence)

    assert len(settings.modules) == 2  # either is half of the weights, which is too much
    assert min(float((each - expected).norm() / expected.norm()) for each in answers) < 0.05


def test_the_divergence_that_is_wanted_is_that_of_the_scheme_unless_it_is_given():
    assert QuantizationPlan("w8a8").divergence_wanted == 5e-5
    assert QuantizationPlan("w4a16").divergence_wanted == float("inf")
    assert QuantizationPlan("w4a16", most_divergence=0.1).divergence_wanted == 0.1


@torch.no_grad()
def test_a_given_strength_stays_even_where_other_scales_bring_the_answers_nearer():
    by_layers, model, x = block(outliers=True), block(outliers=True), rows(200, 64)
    trained, plan = model.norm.weight.clone(), QuantizationPlan("w8a8", strength=0.9, most_divergence=1e9)
    made(by_layers, plan, x)

    made(model, plan, x, lambda: float((model.norm.weight - trained).abs().sum()))

    assert not torch.equal(model.norm.weight, trained)
    assert torch.equal(model.norm.weight, by_layers.norm.weight)

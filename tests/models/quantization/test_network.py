"""From a network to a quantized one: which layers, which scales, and what is refused."""

import pytest
import torch
from torch import nn

from rayrec.models.quantization.folding import Readers, readers_of
from rayrec.models.quantization.linear import QuantizedLinear, quantized_layers, with_quantized_layers
from rayrec.models.quantization.network import QuantizationPlan, quantize
from rayrec.models.quantization.observers import MOST_ROWS, InputObserver, observed
from rayrec.platform.errors import InputError
from tests.models.quantization.layers import rows

OUTLIER = 60.0


class Block(nn.Module):
    """A norm whose outputs two layers read, and a layer whose weight is read without a call."""

    norm_readers = (("norm", ("left", "right")),)

    def __init__(self, width=64, hidden=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.left = nn.Linear(width, hidden, bias=False)
        self.right = nn.Linear(width, hidden)
        self.unasked = nn.Linear(width, width)

    def forward(self, x):
        x = self.norm(x)
        return torch.tanh(self.left(x) / 8) * self.right(x)


def block(seed=0, outliers=False):
    torch.manual_seed(seed)
    made = Block()
    if outliers:
        # A few channels are far larger than all others, as in large language models, and barely matter.
        with torch.no_grad():
            made.norm.weight[:3] = OUTLIER
            for layer in (made.left, made.right):
                layer.weight[:, :3] /= OUTLIER
    return made


def error_of(model, reference, x):
    expected = reference(x)
    return float((model(x) - expected).norm() / expected.norm())


def quantized(model, plan, x):
    with observed(model) as observers:
        model(x)
    return quantize(model, observers, plan)


@torch.no_grad()
def test_only_layers_that_are_called_are_quantized():
    model = block()

    settings = quantized(model, QuantizationPlan("w8a8"), rows(50, 64))

    assert settings.modules == ("left", "right")
    assert isinstance(model.left, QuantizedLinear)
    assert type(model.unasked) is nn.Linear
    assert [name for name, _ in quantized_layers(model)] == ["left", "right"]


@torch.no_grad()
def test_a_network_is_made_again_from_its_settings_and_weights():
    model, x = block(), rows(50, 64)
    settings = quantized(model, QuantizationPlan("w4a16"), x)

    again = with_quantized_layers(block(seed=5), settings)
    again.load_state_dict(model.state_dict())

    assert torch.equal(again(x), model(x))


@torch.no_grad()
def test_scales_that_are_folded_leave_the_function_as_it_was():
    model, x = block(), rows(50, 64)
    (readers,) = readers_of(model)
    expected = model(x)

    scale_K = torch.linspace(0.2, 5.0, 64)
    readers.divide(scale_K)
    for layer in (model.left, model.right):
        layer.weight *= scale_K

    assert readers == Readers(model.norm, ("left", "right"))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static"])
def test_outliers_need_smoothing(scheme):
    reference, x = block(outliers=True), rows(400, 64)
    plain, smooth = block(outliers=True), block(outliers=True)

    quantized(plain, QuantizationPlan(scheme, scales=False), x)
    quantized(smooth, QuantizationPlan(scheme), x)

    fresh = rows(200, 64, seed=9)
    assert error_of(plain, reference, fresh) > 0.1
    assert error_of(smooth, reference, fresh) < 0.25 * error_of(plain, reference, fresh)


@torch.no_grad()
def test_a_given_strength_is_taken():
    reference, x = block(outliers=True), rows(400, 64)
    half = block(outliers=True)

    quantized(half, QuantizationPlan("w8a8", strength=0.5), x)

    assert not torch.equal(half.norm.weight, reference.norm.weight)
    assert error_of(half, reference, x) < 0.05


@torch.no_grad()
def test_awq_is_nearer_than_plain_rounding():
    reference, x = block(outliers=True), rows(400, 64)
    plain, awq = block(outliers=True), block(outliers=True)

    quantized(plain, QuantizationPlan("w4a16", scales=False), x)
    quantized(awq, QuantizationPlan("w4a16"), x)

    fresh = rows(200, 64, seed=9)
    assert error_of(awq, reference, fresh) < 0.9 * error_of(plain, reference, fresh)


class TransformersBlock(nn.Module):
    """Named as those of transformers."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(8), norm(8)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self.self_attn, name, nn.Linear(8, 8))
        for name in ("gate_proj", "up_proj"):
            setattr(self.mlp, name, nn.Linear(8, 16))


class OnePlusWeight(nn.Module):
    """A norm as Gemma's."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * (1 + self.weight)


def test_norms_of_transformers_are_known_by_their_names():
    found = [readers.layers for readers in readers_of(nn.Sequential(TransformersBlock()))]

    assert found == [
        ("0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj"),
        ("0.mlp.gate_proj", "0.mlp.up_proj"),
    ]


def test_nothing_is_folded_into_norms_that_do_not_multiply_or_are_shared():
    parallel = TransformersBlock()
    del parallel.post_attention_layernorm
    after = TransformersBlock()
    after.post_feedforward_layernorm = nn.LayerNorm(8)

    assert not list(readers_of(TransformersBlock(OnePlusWeight)))
    assert not list(readers_of(parallel))
    assert not list(readers_of(after))


@torch.no_grad()
def test_weights_and_inputs_that_are_not_finite_are_refused():
    broken = block()
    broken.left.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="left: the weights are not finite"):
        quantized(broken, QuantizationPlan("w8a8"), rows(9, 64))

    x = rows(9, 64)
    x[0, 0] = torch.inf
    with pytest.raises(InputError, match="left: its inputs on the calibration data are not finite"):
        quantized(block(), QuantizationPlan("w8a8"), x)


@torch.no_grad()
def test_groups_that_do_not_divide_the_inputs_are_refused_with_those_that_do():
    with pytest.raises(
        InputError, match="left has 64 inputs, which groups of 128 do not divide; take groups of 64"
    ):
        quantized(block(), QuantizationPlan("w4a16", group_size=128), rows(9, 64))


def test_groups_are_of_int4_alone():
    with pytest.raises(InputError, match="group_size is 32 and the scheme 'w8a8'"):
        QuantizationPlan("w8a8", group_size=32).settings(("a",), torch.device("cpu"))


@torch.no_grad()
def test_a_network_without_linear_layers_is_refused():
    with pytest.raises(InputError, match="LayerNorm has no linear layer that answers"):
        quantized(nn.LayerNorm(4), QuantizationPlan("w8a8"), rows(3, 4))


def test_settings_of_layers_that_are_not_there_are_refused():
    settings = QuantizationPlan("w8a8").settings(("left", "gone"), torch.device("cpu"))

    with pytest.raises(InputError, match="no linear layer 'gone'"):
        with_quantized_layers(block(), settings)


def test_an_observer_keeps_a_bounded_sample_of_all_calls():
    observer = InputObserver(2)

    for call in range(40):
        observer.see(torch.full((1, 300, 2), float(call)))

    assert len(observer.sample_SK) == MOST_ROWS
    assert observer.sample_SK[0, 0] == 0
    assert observer.sample_SK[-1, 0] == 39
    assert observer.num_rows == 12_000
    assert observer.largest_K.tolist() == [39.0, 39.0]
    assert observer.mean_K.tolist() == [pytest.approx(19.5)] * 2

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rayrec.models.base import keyed_random
from rayrec.models.base.keyed_random import KeyedDropout, token_keys
from rayrec.platform import hashing
from rayrec.platform.tensor_hashing import mix64

INT64 = st.integers(-(2**63), 2**63 - 1)


def masks(dropout: KeyedDropout, keys_N: torch.Tensor, width: int = 16) -> torch.Tensor:
    return dropout(torch.ones(len(keys_N), width), keys_N) != 0


@given(st.lists(INT64, min_size=1, max_size=20))
def test_mix64_is_the_hash_of_the_platform(values):
    expected = hashing.mix64(np.array(values, dtype=np.int64))

    assert mix64(torch.tensor(values)).numpy().view(np.uint64).tolist() == expected.tolist()


def test_mix64_gives_the_published_splitmix64_sequence():
    # First output of splitmix64 from state 0: the state is advanced, then mixed.
    assert int(mix64(torch.tensor([0]))) % 2**64 == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.83])
def test_dropout_drops_at_its_rate_and_keeps_the_expectation(probability):
    dropout = KeyedDropout(probability, index=1)
    x_ND = torch.full((2000, 50), 3.0)

    out_ND = dropout(x_ND, token_keys(0, 0, torch.arange(2000), torch.zeros(2000, dtype=torch.int64)))

    # Five standard deviations of a mean of 100,000 draws.
    tolerance = 5 * (probability * (1 - probability) / x_ND.numel()) ** 0.5
    assert float((out_ND == 0).float().mean()) == pytest.approx(probability, abs=tolerance)
    assert float(out_ND.mean()) == pytest.approx(3.0, abs=3.0 * tolerance / (1 - probability))
    torch.testing.assert_close(out_ND[out_ND != 0].unique(), torch.tensor([3.0 / (1 - probability)]))


def test_dropout_does_nothing_while_evaluating_or_at_probability_zero():
    x_ND = torch.randn(5, 3)
    keys_N = torch.arange(5)

    assert KeyedDropout(0.5, 0).eval()(x_ND, keys_N) is x_ND
    assert KeyedDropout(0.0, 0)(x_ND, keys_N) is x_ND


@given(st.lists(INT64, min_size=2, max_size=12, unique=True), st.data())
def test_a_rows_mask_does_not_depend_on_its_company(row_keys, data):
    dropout = KeyedDropout(0.5, index=4)
    rows, places = torch.tensor(row_keys), torch.arange(len(row_keys)) % 3
    together = masks(dropout, token_keys(1, 5, rows, places))
    chosen = torch.tensor(data.draw(st.permutations(range(len(row_keys)))))[: len(row_keys) // 2 + 1]

    alone = masks(dropout, token_keys(1, 5, rows[chosen], places[chosen]))

    assert torch.equal(alone, together[chosen])


def test_masks_differ_between_seeds_steps_rows_places_and_layers():
    def mask(seed=0, step=0, row=0, place=0, index=0):
        keys_N = token_keys(seed, step, torch.tensor([row]), torch.tensor([place]))
        return masks(KeyedDropout(0.5, index), keys_N, width=64)

    variants = [mask(), mask(seed=1), mask(step=1), mask(row=1), mask(place=1), mask(index=1)]

    for first in range(len(variants)):
        for second in range(first):
            agreement = float((variants[first] == variants[second]).float().mean())
            assert 0.2 < agreement < 0.8, (first, second)


def test_neighboring_elements_and_tokens_are_uncorrelated():
    keys_N = token_keys(0, 0, torch.zeros(4000, dtype=torch.int64), torch.arange(4000))
    mask_ND = masks(KeyedDropout(0.5, 2), keys_N, width=8).double()

    correlations = torch.corrcoef(mask_ND.T) - torch.eye(8)
    along_tokens = torch.corrcoef(torch.stack([mask_ND[:-1].flatten(), mask_ND[1:].flatten()]))[0, 1]

    assert float(correlations.abs().max()) < 0.08  # five standard deviations of 4,000 pairs
    assert abs(float(along_tokens)) < 0.03


@pytest.mark.parametrize("width", [1, 3, 4, 50, 128])
@pytest.mark.parametrize("probability", [0.1, 0.3, 0.77])
def test_the_kernel_of_cpus_gives_the_bits_of_torchs_operations(probability, width, monkeypatch):
    random = torch.Generator().manual_seed(width)
    values_ND = torch.randn(200, 2 * width, generator=random)[:, ::2]  # elements are not side by side
    values_ND[3, 0], values_ND[4, 0] = torch.inf, torch.nan
    grad_ND = torch.randn(200, width, generator=random)
    keys_N = token_keys(0, 7, torch.arange(200), torch.arange(200) % 9)
    dropout = KeyedDropout(probability, index=5)

    def found() -> list[bytes]:
        x_ND = values_ND.clone().requires_grad_()
        out_ND = dropout(x_ND, keys_N)
        out_ND.backward(grad_ND)
        return [out_ND.detach().numpy().tobytes(), x_ND.grad.numpy().tobytes()]

    by_kernel = found()
    monkeypatch.setattr(keyed_random, "_has_kernel", lambda x_ND: False)

    assert by_kernel == found()


@pytest.mark.parametrize("num_keys", [0, 3, 7])
def test_other_numbers_of_keys_than_rows_are_refused(num_keys):
    keys_N = torch.arange(10)[:num_keys]  # behind which memory has others

    with pytest.raises(RuntimeError, match="expand"):
        KeyedDropout(0.5, 0)(torch.ones(6, 4), keys_N)


def test_tensors_that_hold_no_numbers_have_the_shape_of_what_is_left():
    with FakeTensorMode():
        out_ND = KeyedDropout(0.5, 0)(torch.ones(6, 4), torch.arange(6))

    assert out_ND.shape == (6, 4)


def test_keys_that_were_made_for_inference_serve_training_too():
    with torch.inference_mode():
        keys_N = torch.arange(6)
    x_ND = torch.ones(6, 4, requires_grad=True)

    out_ND = KeyedDropout(0.5, 0)(x_ND, keys_N)
    out_ND.sum().backward()

    assert torch.equal(x_ND.grad, out_ND)


def test_without_tokens_nothing_is_dropped():
    x_ND = torch.zeros(0, 8, requires_grad=True)

    KeyedDropout(0.5, 0)(x_ND, torch.zeros(0, dtype=torch.int64)).sum().backward()

    assert x_ND.grad.shape == (0, 8)


def test_numbers_of_other_types_are_dropped_alike():
    x_ND = torch.ones(30, 8)
    keys_N = torch.arange(30)
    expected = KeyedDropout(0.5, 0)(x_ND, keys_N)

    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(KeyedDropout(0.5, 0)(x_ND.to(dtype), keys_N), expected.to(dtype))

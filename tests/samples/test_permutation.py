import numpy as np
import pytest

from rayrec.samples.reading.permutation import permutation


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 64, 65, 1000, 70_000, 131_072])
def test_it_is_the_permutation_that_numpy_draws(num_rows):
    for seed in ([0, 0, 1], [2**63, 7, num_rows]):
        expected = np.random.default_rng(seed).permutation(num_rows)
        assert np.array_equal(permutation(seed, num_rows), expected)

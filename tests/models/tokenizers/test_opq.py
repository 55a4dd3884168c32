import torch

from rayrec.models.tokenizers.opq import OptimizedProductQuantizer
from tests.models.tokenizers.vectors import item_like_vectors


def test_the_rotation_finds_the_directions_that_vary_together():
    """Two independent factors, one twice as strong, each along a direction that is aligned with no axis."""
    generator = torch.Generator().manual_seed(0)
    factors_I2 = torch.randint(4, (400, 2), generator=generator).float()
    directions_2D = torch.linalg.qr(torch.randn(6, 2, generator=generator))[0].T
    vectors_ID = factors_I2 * torch.tensor([2.0, 1.0]) @ directions_2D + 0.01 * torch.randn(
        400, 6, generator=generator
    )

    quantizer = OptimizedProductQuantizer(num_levels=2, codebook_size=4, seed=0).fit(vectors_ID)
    codes_IL = quantizer.encode(vectors_ID)

    # A code of each level stands for one value of one factor.
    assert len({tuple(row) for row in torch.cat([factors_I2.long(), codes_IL], dim=1).tolist()}) == 16
    assert float((vectors_ID - quantizer.decode(codes_IL)).square().mean()) < 1e-3


def test_the_learned_rotation_leaves_less_than_the_axes_do():
    vectors_ID = item_like_vectors(dim=16) * torch.linspace(0.1, 3, 16)

    def error(num_iterations):
        quantizer = OptimizedProductQuantizer(4, 16, 0, num_iterations).fit(vectors_ID)
        return float((vectors_ID - quantizer.decode(quantizer.encode(vectors_ID))).square().sum())

    assert error(25) < 0.97 * error(1)


def test_dimensions_need_not_be_a_multiple_of_the_levels():
    vectors_ID = item_like_vectors(dim=7)
    quantizer = OptimizedProductQuantizer(num_levels=3, codebook_size=8).fit(vectors_ID)
    decoded_ID = quantizer.decode(quantizer.encode(vectors_ID))

    assert decoded_ID.shape == vectors_ID.shape
    assert quantizer.codebooks_LKD.shape == (3, 8, 3)

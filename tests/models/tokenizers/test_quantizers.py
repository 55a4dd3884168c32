"""What holds for every quantizer in `TOKENIZERS`."""

import numpy as np
import pytest
import torch

from rayrec.models.tokenizers.item_tokenizer import TOKENIZERS, fitted_quantizer
from tests.helpers.examples import cases
from tests.models.tokenizers.vectors import item_like_vectors, perplexity

ALL = pytest.mark.parametrize(
    "name",
    # LETTER's is an RQ-VAE with two more losses, which take long; see test_letter.py for what they do.
    [pytest.param(name, marks=pytest.mark.slow) if name == "letter" else name for name in TOKENIZERS.names()],
)
FEW = {"rq_kmeans": 10, "balanced_rq_kmeans": 10, "rq_vae": 20, "letter": 12, "opq": 10}


def fitted(name, vectors_ID, num_levels=3, codebook_size=16, seed=0):
    return fitted_quantizer(name, vectors_ID, num_levels, codebook_size, seed, FEW[name])


@ALL
def test_codes_say_more_of_a_vector_level_by_level(name):
    vectors_ID = item_like_vectors() + 3  # about a mean that is not zero
    quantizer = fitted(name, vectors_ID)
    codes_IL = quantizer.encode(vectors_ID)

    assert codes_IL.shape == (600, 3)
    assert codes_IL.dtype == torch.int64
    assert quantizer.codebooks_LKD.shape[:2] == (3, 16)
    assert all(perplexity(codes_I) > 8 for codes_I in codes_IL.T.numpy())
    spread = (vectors_ID - vectors_ID.mean(0)).square().sum()
    errors = [
        float((vectors_ID - quantizer.decode(codes_IL[:, :d])).square().sum() / spread) for d in (1, 2, 3)
    ]
    assert 1 > errors[0] > errors[1] > errors[2] > 0
    assert errors[2] < 0.8


@ALL
def test_a_code_depends_on_the_vector_alone(name):
    vectors_ID = item_like_vectors()
    quantizer = fitted(name, vectors_ID)
    whole_IL = quantizer.encode(vectors_ID)

    some = torch.tensor([3, 599, 17, 3])
    assert torch.equal(quantizer.encode(vectors_ID[some]), whole_IL[some])
    assert quantizer.encode(item_like_vectors(num_items=5, seed=9)).shape == (5, 3)


@ALL
def test_the_same_vectors_and_seed_give_the_same_codes(name):
    vectors_ID = item_like_vectors(num_items=200)
    before_ID = vectors_ID.clone()
    first, again, other = (
        fitted(name, vectors_ID, codebook_size=8, seed=seed).encode(vectors_ID) for seed in (1, 1, 2)
    )

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(vectors_ID, before_ID)


@ALL
def test_what_was_saved_encodes_and_decodes_alike(name):
    vectors_ID = item_like_vectors(num_items=200)
    quantizer = fitted(name, vectors_ID, num_levels=2, codebook_size=8)
    restored = TOKENIZERS[name](2, 8, 0).restore(quantizer.arrays())
    codes_IL = quantizer.encode(vectors_ID)

    assert torch.equal(restored.encode(vectors_ID), codes_IL)
    assert torch.equal(restored.decode(codes_IL), quantizer.decode(codes_IL))
    assert all(array.dtype == np.float32 for array in quantizer.arrays().values())
    with pytest.raises(ValueError, match="of"):
        TOKENIZERS[name](2, 4, 0).restore(quantizer.arrays())
    with pytest.raises((KeyError, ValueError)):
        TOKENIZERS[name](2, 8, 0).restore({})


@ALL
def test_the_last_code_is_the_nearest_at_the_last_level(name):
    vectors_ID = item_like_vectors(num_items=200)
    quantizer = fitted(name, vectors_ID, codebook_size=8)
    codes_IL = quantizer.encode(vectors_ID)

    distances_IK = quantizer.last_level_distances(vectors_ID, codes_IL)

    assert distances_IK.shape == (200, 8)
    assert torch.equal(distances_IK.argmin(dim=1), codes_IL[:, -1])


@ALL
def test_vectors_that_cannot_be_told_apart_are_refused(name):
    with pytest.raises(
        ValueError, match=r"all 30 item vectors are identical|the 30 parts .* only 1 distinct"
    ):
        fitted(name, torch.ones(30, 6))
    vectors_ID = item_like_vectors(num_items=9, dim=6)
    with pytest.raises(ValueError, match=r"codebook_size is 16, but the 9 .* only 9 distinct .* smaller"):
        fitted(name, vectors_ID)
    vectors_ID[4, 2] = torch.nan
    with pytest.raises(ValueError, match="1 of 9 item vectors hold NaN or infinity, the first at position 4"):
        fitted(name, vectors_ID, codebook_size=2)


@ALL
@pytest.mark.parametrize(("num_distinct", "codebook_size"), cases([(40, 8), (10, 2), (2, 2)], [(40, 8)]))
def test_without_a_codebook_size_distinct_vectors_decide(name, num_distinct, codebook_size):
    """Items that repeat share codes; where too little is left of their vectors, codes are unused."""
    kinds_ID = item_like_vectors(num_items=num_distinct, dim=6)
    kind_I = torch.arange(500) % num_distinct

    quantizer = fitted(name, kinds_ID[kind_I], codebook_size=None)

    codes_IL = quantizer.encode(kinds_ID[kind_I])
    assert quantizer.codebooks_LKD.shape[:2] == (3, codebook_size)
    assert quantizer.codebooks_LKD.isfinite().all()
    assert torch.equal(codes_IL, codes_IL[:num_distinct][kind_I])
    assert len(codes_IL[:, 0].unique()) == codebook_size
    assert quantizer.decode(codes_IL).abs().max() < 10


@ALL
def test_nothing_is_encoded_before_it_is_fitted(name):
    quantizer = TOKENIZERS[name](2, 4, 0)
    with pytest.raises(ValueError, match="no codebooks yet"):
        quantizer.encode(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="no codebooks yet"):
        _ = quantizer.codebooks_LKD
    with pytest.raises(ValueError, match="codebook_size must be at least 1, got 0"):
        TOKENIZERS[name](2, 0, 0)


@ALL
def test_vectors_of_another_width_are_refused(name):
    vectors_ID = item_like_vectors(num_items=60, dim=6)
    quantizer = fitted(name, vectors_ID, num_levels=2, codebook_size=4)
    with pytest.raises(ValueError, match="for vectors of 6 dimensions, got 5"):
        quantizer.encode(vectors_ID[:, :5])


def test_an_unknown_tokenizer_is_refused_with_those_that_there_are():
    with pytest.raises(
        ValueError, match="no tokenizer 'vq'; known: rq_kmeans, balanced_rq_kmeans, rq_vae, letter, opq"
    ):
        fitted_quantizer("vq", torch.zeros(3, 3), 2, 2)

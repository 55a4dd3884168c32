import numpy as np
import pytest

from rayrec.models.tokenizers.fit import fit_registry
from rayrec.models.tokenizers.vector_preparation import BlockScaling, PrincipalComponents, VectorPreparation


def combine(blocks, item_ids_I, weights=None, seed=0):
    return BlockScaling.fit(blocks, weights, seed).apply(blocks, item_ids_I)


def principal_components(vectors_ID, dim):
    return PrincipalComponents.fit(vectors_ID, dim).apply(vectors_ID)


def test_blocks_count_by_their_weight_whatever_their_scale():
    rng = np.random.default_rng(0)
    small = rng.standard_normal((50, 3)).astype(np.float32) * 0.01 + 7
    large = rng.standard_normal((50, 5)).astype(np.float32) * 100
    out = combine({"behavior": small, "text": large}, np.arange(50), {"text": 4.0})

    assert out.num_without_data == 0
    assert out.vectors_ID.shape == (50, 8)
    np.testing.assert_allclose(out.vectors_ID.mean(axis=0), 0.0, atol=1e-5)
    squares = np.square(out.vectors_ID)
    assert squares[:, :3].sum(axis=1).mean() == pytest.approx(1.0, rel=1e-4)
    assert squares[:, 3:].sum(axis=1).mean() == pytest.approx(4.0, rel=1e-4)


def test_an_item_unknown_to_one_block_has_that_blocks_mean():
    block = np.array([[1.0], [3.0], [np.nan]], dtype=np.float32)
    other = np.array([[0.0], [1.0], [5.0]], dtype=np.float32)
    out = combine({"behavior": block, "text": other}, np.arange(3))

    assert out.num_without_data == 0
    np.testing.assert_allclose(out.vectors_ID[:, 0], [-1.0, 1.0, 0.0], atol=1e-6)


def test_items_without_data_get_distinct_noise_keyed_by_their_id():
    block = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    block[[1, 4]] = np.nan
    ids_I = np.array([5, -7, 3, 1, 2**40, 8])
    out = combine({"behavior": block}, ids_I)

    assert out.num_without_data == 2
    np.testing.assert_allclose(np.linalg.norm(out.vectors_ID[[1, 4]], axis=1), 1.0, rtol=1e-5)
    assert abs(out.vectors_ID[1] @ out.vectors_ID[4]) < 0.9
    # Another order of the catalog, the same noise.
    back = combine({"behavior": block[::-1]}, ids_I[::-1])
    np.testing.assert_allclose(back.vectors_ID[::-1], out.vectors_ID, atol=1e-6)
    other_seed = combine({"behavior": block}, ids_I, seed=1)
    assert not np.allclose(other_seed.vectors_ID[1], out.vectors_ID[1])


@pytest.mark.parametrize(
    ("blocks", "weights", "message"),
    [
        ({}, {}, "vectors from"),
        ({"text": np.eye(3)}, {"txt": 1.0}, r"vectors from \['text'\], but weights for \['txt'\]"),
        ({"text": np.eye(3)}, {"text": 0.0}, "weight of the text vectors must be positive, got 0"),
        ({"text": np.eye(2)}, {}, "3 items, but 2 text vectors"),
        ({"text": np.full((3, 2), np.nan)}, {}, "the text vectors know none of 3 items"),
        ({"text": np.ones((3, 2))}, {}, "the text vectors of all 3 known items are the same"),
    ],
)
def test_blocks_that_cannot_be_combined_are_refused(blocks, weights, message):
    with pytest.raises(ValueError, match=message):
        combine(blocks, np.arange(3), weights)


def test_principal_components_keep_the_directions_of_largest_variance():
    scales_D = np.array([1.0, 5.0, 0.1, 3.0])
    vectors_ID = np.random.default_rng(0).standard_normal((4000, 4)) * scales_D + 7
    components_IC = principal_components(vectors_ID.astype(np.float32), 2)

    assert components_IC.shape == (4000, 2)
    np.testing.assert_allclose(components_IC.std(axis=0), [5.0, 3.0], rtol=0.05)
    np.testing.assert_allclose(components_IC.mean(axis=0), 0.0, atol=1e-4)
    centered_ID = vectors_ID - vectors_ID.mean(axis=0)
    np.testing.assert_allclose(principal_components(vectors_ID, 9), centered_ID, rtol=1e-4, atol=1e-5)


def test_codes_of_components_are_used_more_evenly_than_codes_of_wide_vectors():
    rng = np.random.default_rng(0)
    lengths_I1 = rng.gamma(1.0, size=(1500, 1))
    wide_ID = (rng.standard_normal((1500, 200)) / np.sqrt(np.arange(1, 201)) * lengths_I1).astype(np.float32)

    def last_perplexity(vectors_ID):
        _, report = fit_registry(vectors_ID, np.arange(1500), "data", codebook_size=32)
        return report["levels"][2]["perplexity"]

    assert last_perplexity(principal_components(wide_ID, 16)) > 1.5 * last_perplexity(wide_ID)


def two_blocks(num_items=40):
    rng = np.random.default_rng(1)
    blocks = {
        "interactions": rng.standard_normal((num_items, 6)).astype(np.float32) + 3,
        "text": rng.standard_normal((num_items, 10)).astype(np.float32) * 7,
    }
    blocks["interactions"][5] = np.nan
    blocks["interactions"][9] = blocks["text"][9] = np.nan
    return blocks


def test_new_items_are_prepared_as_the_fitted_ones_were():
    blocks, ids_I = two_blocks(), np.arange(40)
    fitted = VectorPreparation.fit(blocks, ids_I, {"text": 2.0}, num_components=4, seed=3)
    restored = VectorPreparation.from_saved(fitted.settings(), fitted.arrays())

    whole = fitted.apply(blocks, ids_I)
    some = [9, 3, 5]
    part = restored.apply({name: block[some] for name, block in blocks.items()}, ids_I[some])

    assert (whole.num_without_data, part.num_without_data) == (1, 1)
    assert whole.vectors_ID.shape == (40, 4)
    np.testing.assert_allclose(part.vectors_ID, whole.vectors_ID[some], rtol=1e-5, atol=1e-6)
    # A block that is not there at all knows nothing of any item, as one with a row of NaN.
    text_only = restored.apply({"text": blocks["text"][[5]]}, ids_I[[5]])
    np.testing.assert_allclose(text_only.vectors_ID[0], whole.vectors_ID[5], rtol=1e-5, atol=1e-6)


def test_blocks_of_another_kind_than_those_fitted_are_refused():
    blocks, ids_I = two_blocks(), np.arange(40)
    fitted = VectorPreparation.fit(blocks, ids_I)

    with pytest.raises(ValueError, match="the text vectors have 9 dimensions; 10 were fitted"):
        fitted.apply({"text": blocks["text"][:, :9]}, ids_I)
    with pytest.raises(
        ValueError, match=r"vectors from \['image'\], but only \['interactions', 'text'\] were"
    ):
        fitted.apply({"image": blocks["text"]}, ids_I)

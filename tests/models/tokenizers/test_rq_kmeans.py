import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.tokenizers.kmeans import lloyd, nearest_centroids
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from tests.helpers.examples import examples


def clustered_vectors(num_items, dim, seed, num_centers=12):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(num_centers, dim, generator=generator) * 4
    cluster_I = torch.randint(num_centers, (num_items,), generator=generator)
    return centers[cluster_I] + torch.randn(num_items, dim, generator=generator), cluster_I


def test_well_separated_groups_are_told_apart_level_by_level():
    # Four far corners, in each the same four small offsets: the tuple is (corner, offset).
    corners = torch.tensor([[0.0, 0], [100, 0], [0, 100], [100, 100]])
    offsets = torch.tensor([[-1.0, -1], [1, -1], [-1, 1], [1, 1]])
    vectors_ID = (corners[:, None] + offsets).reshape(16, 2)

    kmeans = ResidualKMeans(num_levels=2, codebook_size=4, seed=3)
    codes_IL = kmeans.fit(vectors_ID).encode(vectors_ID)

    corner_codes, offset_codes = codes_IL[:, 0].view(4, 4), codes_IL[:, 1].view(4, 4)
    assert (corner_codes == corner_codes[:, :1]).all()
    assert len(set(corner_codes[:, 0].tolist())) == 4
    assert (offset_codes == offset_codes[:1]).all()
    assert len(set(offset_codes[0].tolist())) == 4
    torch.testing.assert_close(kmeans.decode(codes_IL), vectors_ID)
    torch.testing.assert_close(kmeans.decode(codes_IL[:, :1]), corners.repeat_interleave(4, dim=0))


@examples(15)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 100))
def test_a_code_names_the_nearest_centroid(num_centroids, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    points_ID = torch.randn(50, dim, generator=generator)
    centroids_KD = torch.randn(num_centroids, dim, generator=generator)

    codes_I, squares_I = nearest_centroids(points_ID, centroids_KD)

    exact_IK = (points_ID[:, None] - centroids_KD).square().sum(2)
    torch.testing.assert_close(squares_I, exact_IK.min(1).values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(exact_IK.gather(1, codes_I[:, None])[:, 0], exact_IK.min(1).values)


def test_the_first_level_is_a_fixed_point_of_lloyd():
    vectors_ID, _ = clustered_vectors(400, 5, seed=0)
    kmeans = ResidualKMeans(num_levels=1, codebook_size=12, seed=0, num_iterations=100).fit(vectors_ID)
    codes_I = kmeans.encode(vectors_ID)[:, 0]

    means = torch.stack([vectors_ID[codes_I == code].mean(0) for code in range(12)])
    torch.testing.assert_close(kmeans.codebooks_LKD[0], means, atol=1e-4, rtol=1e-4)


def test_every_level_leaves_less_and_uses_all_codes():
    vectors_ID, _ = clustered_vectors(600, 8, seed=1)
    kmeans = ResidualKMeans(num_levels=3, codebook_size=32, seed=0).fit(vectors_ID)
    codes_IL = kmeans.encode(vectors_ID)

    errors = [float((vectors_ID - kmeans.decode(codes_IL[:, :d])).square().sum()) for d in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.5 * errors[0]
    assert [len(codes_IL[:, level].unique()) for level in range(3)] == [32, 32, 32]


def test_an_empty_cluster_moves_to_the_farthest_point():
    # Two starting centroids on the same spot: one of them has no points.
    points_ID = torch.tensor([[0.0], [0.0], [1.0], [50.0]])
    centroids_KD = lloyd(points_ID, torch.tensor([[0.0], [0.0]]), num_iterations=10)

    torch.testing.assert_close(centroids_KD.sort(dim=0).values, torch.tensor([[1 / 3], [50.0]]))


def test_the_seed_decides_the_codebooks():
    vectors_ID, _ = clustered_vectors(300, 6, seed=2)

    def codebooks(seed):
        return ResidualKMeans(num_levels=2, codebook_size=16, seed=seed).fit(vectors_ID).codebooks_LKD

    assert torch.equal(codebooks(5), codebooks(5))
    assert not torch.equal(codebooks(5), codebooks(6))


def test_chunks_do_not_change_the_result(monkeypatch):
    vectors_ID, _ = clustered_vectors(200, 6, seed=3)
    whole = ResidualKMeans(num_levels=2, codebook_size=8).fit(vectors_ID)
    monkeypatch.setattr("rayrec.models.tokenizers.kmeans._CHUNK_ELEMENTS", 8 * 30)
    chunked = ResidualKMeans(num_levels=2, codebook_size=8).fit(vectors_ID)

    torch.testing.assert_close(chunked.codebooks_LKD, whole.codebooks_LKD, atol=1e-4, rtol=1e-4)
    assert torch.equal(chunked.encode(vectors_ID), whole.encode(vectors_ID))


def test_fitting_leaves_the_vectors_alone():
    vectors_ID, _ = clustered_vectors(100, 4, seed=4)
    before = vectors_ID.clone()
    ResidualKMeans(num_levels=2, codebook_size=8).fit(vectors_ID).encode(vectors_ID)
    assert torch.equal(vectors_ID, before)


def test_restored_codebooks_encode_alike():
    vectors_ID, _ = clustered_vectors(100, 4, seed=5)
    kmeans = ResidualKMeans(num_levels=2, codebook_size=8).fit(vectors_ID)
    restored = ResidualKMeans(num_levels=2, codebook_size=8).restore(kmeans.arrays())

    assert torch.equal(restored.encode(vectors_ID), kmeans.encode(vectors_ID))


def test_vectors_that_hold_nan_are_counted():
    vectors_ID = torch.zeros(10, 3)
    vectors_ID[4, 1] = torch.nan
    vectors_ID[7] = torch.inf
    with pytest.raises(
        ValueError, match="2 of 10 item vectors hold NaN or infinity, the first at position 4"
    ):
        ResidualKMeans(codebook_size=2).fit(vectors_ID)


def test_identical_vectors_are_refused():
    with pytest.raises(ValueError, match="all 20 item vectors are identical"):
        ResidualKMeans(codebook_size=4).fit(torch.ones(20, 3))


def test_fewer_distinct_vectors_than_codes_are_refused():
    vectors_ID = torch.from_numpy(np.repeat(np.eye(5, dtype=np.float32), 4, axis=0))
    with pytest.raises(ValueError, match="codebook_size is 8, but the 20 item vectors have only 5 distinct"):
        ResidualKMeans(codebook_size=8).fit(vectors_ID)


def test_a_level_with_too_little_left_is_refused_by_name():
    # Level 0 explains all five distinct vectors, so nothing is left to cluster.
    with pytest.raises(ValueError, match="residuals left for level 1 have only 1 distinct values"):
        ResidualKMeans(num_levels=2, codebook_size=5).fit(torch.eye(5))


@pytest.mark.parametrize("setting", ["num_levels", "codebook_size", "num_iterations"])
def test_settings_below_one_are_refused(setting):
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, got 0"):
        ResidualKMeans(**{setting: 0})


def test_use_before_fit_and_wrong_shapes_are_refused():
    kmeans = ResidualKMeans(num_levels=2, codebook_size=2)
    with pytest.raises(ValueError, match="no codebooks yet"):
        kmeans.encode(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expected item vectors of shape"):
        kmeans.fit(torch.zeros(0, 3))
    kmeans.fit(torch.arange(12.0).square().view(6, 2))
    with pytest.raises(ValueError, match="vectors of 2 dimensions, got 3"):
        kmeans.encode(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expected 1 to 2 codes per item, got 3"):
        kmeans.decode(torch.zeros(2, 3, dtype=torch.int64))

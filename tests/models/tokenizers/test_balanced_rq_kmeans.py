import pytest
import torch

from rayrec.models.tokenizers.balanced_rq_kmeans import BalancedResidualKMeans
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from tests.models.tokenizers.vectors import item_like_vectors


def sizes(quantizer, vectors_ID, level):
    return quantizer.encode(vectors_ID)[:, level].bincount(minlength=quantizer.codebook_size)


def test_clusters_of_every_level_are_of_nearly_equal_size_at_some_cost():
    # Clusters of the data are of very unequal size: half of all items are of one kind.
    vectors_ID = torch.cat([item_like_vectors(750, num_clusters=1), item_like_vectors(750, seed=1)])
    balanced = BalancedResidualKMeans(3, 30, 0).fit(vectors_ID)
    plain = ResidualKMeans(3, 30, 0).fit(vectors_ID)

    for level in range(3):
        counts_K = sizes(balanced, vectors_ID, level)
        # The fair size is 50.
        assert counts_K.min() >= 25
        assert counts_K.max() <= 75
        assert counts_K.double().std() < 0.5 * sizes(plain, vectors_ID, level).double().std()

    def error(quantizer):
        return float((vectors_ID - quantizer.decode(quantizer.encode(vectors_ID))).square().sum())

    assert error(balanced) < 1.4 * error(plain)


def test_items_that_were_not_fitted_fill_the_clusters_evenly_too():
    vectors_ID = item_like_vectors(3000, num_clusters=3)
    balanced = BalancedResidualKMeans(1, 10, 0).fit(vectors_ID[:1500])

    counts_K = sizes(balanced, vectors_ID[1500:], level=0)
    assert counts_K.min() > 100
    assert counts_K.max() < 200


def test_a_sample_places_the_centroids_of_many_points(monkeypatch):
    monkeypatch.setattr("rayrec.models.tokenizers.balanced_rq_kmeans._MOST_POINTS_OF_A_CENTROID", 20)
    vectors_ID = item_like_vectors(1500)
    counts_K = sizes(BalancedResidualKMeans(1, 10, 0).fit(vectors_ID), vectors_ID, level=0)
    assert counts_K.min() > 120
    assert counts_K.max() < 180


def test_equal_vectors_keep_one_code():
    vectors_ID = item_like_vectors(100)
    vectors_ID[:40] = vectors_ID[0]
    balanced = BalancedResidualKMeans(2, 10, 0).fit(vectors_ID)
    assert len(balanced.encode(vectors_ID)[:40].unique(dim=0)) == 1


def test_prices_that_do_not_fit_the_codebooks_are_refused():
    arrays = BalancedResidualKMeans(2, 4, 0).fit(item_like_vectors(50)).arrays()
    with pytest.raises(ValueError, match="prices of shape"):
        BalancedResidualKMeans(2, 4, 0).restore(arrays | {"prices_LK": arrays["prices_LK"][:1]})

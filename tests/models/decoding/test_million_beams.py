"""A catalog's worth of beams, held to the one thing that must never fail: they are items."""

import numpy as np
import pytest
import torch

from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.prefixes import ItemDistribution, item_code_log_probs
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.cross_decoder import CrossDecoder
from rayrec.models.generative.lazy_decoder import LazyDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from tests.models.networks import DIM, histories, tensor_batch

NUM_ITEMS, NUM_CODES, NUM_LEVELS = 12_101, 256, 3
NUM_ROWS, BEAMS, BATCH = 200, 5_000, 20


def keys(codes: np.ndarray) -> np.ndarray:
    """One number for each tuple of codes."""
    return codes @ (NUM_CODES ** np.arange(codes.shape[-1]))


def catalog(random: np.random.Generator) -> np.ndarray:
    """[I, L] codes of items, in an order of their own."""
    codes_IL = np.unique(random.integers(NUM_CODES, size=(2 * NUM_ITEMS, NUM_LEVELS)), axis=0)
    return random.permutation(codes_IL)[:NUM_ITEMS]


def num_invalid_items(items_BW: np.ndarray) -> int:
    """Those that are none, or that their row has already."""
    is_item_BW = (items_BW >= 0) & (items_BW < NUM_ITEMS)
    is_new_BW = np.diff(np.sort(items_BW, axis=1), axis=1, prepend=-1) > 0
    return int((~(is_item_BW & is_new_BW)).sum())


def test_a_million_decoded_beams_hold_no_invalid_item():
    """Each prefix that the model is asked about begins an item, and each beam is another item of its row."""
    random = np.random.default_rng(0)
    codes_IL = catalog(random)
    trie = CodeTrie.from_codes(codes_IL)
    prefixes = [np.unique(keys(codes_IL[:, :depth])) for depth in range(NUM_LEVELS)]
    generator = torch.Generator().manual_seed(0)
    num_asked = num_invalid = num_beams = 0

    def step(depth, codes_BWd, parent_BW):
        nonlocal num_asked, num_invalid
        valid = np.isin(keys(codes_BWd.numpy()), prefixes[depth])
        num_asked += valid.size
        num_invalid += int((~valid).sum())
        return torch.randn(BATCH, 1, NUM_CODES, generator=generator).expand(-1, codes_BWd.shape[1], -1)

    for _ in range(NUM_ROWS // BATCH):
        items_BW = beam_search(ItemDistribution(step, trie, BATCH), BEAMS).items_BW.numpy()
        num_invalid += num_invalid_items(items_BW)
        num_beams += items_BW.size

    assert num_beams == 1_000_000
    assert num_asked > 100_000
    assert num_invalid == 0


@pytest.mark.parametrize("are_allowed", [False, True], ids=["all but some", "some alone"])
def test_beams_of_a_network_with_caches_keep_to_a_filter(are_allowed):
    """A hundredth of them: the prefixes are those that its caches are of, and no beam is what must not be."""
    random = np.random.default_rng(1)
    codes_IL, sizes = catalog(random), (NUM_CODES,) * NUM_LEVELS
    decoder = CrossDecoder(DIM, 2, 2, 16, sizes, 0.0)
    network = LazyDecoder(decoder, torch.from_numpy(codes_IL), 6, 0.0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model = GenerativeRecommender(network, torch.from_numpy(codes_IL), 1, NUM_LEVELS).eval()
    histories_of_rows = random.integers(NUM_ITEMS, size=(2, 5)).tolist()
    listed_BE = random.permuted(np.tile(np.arange(NUM_ITEMS), (2, 1)), axis=1)[:, : NUM_ITEMS // 2]
    is_listed_BI = np.zeros((2, NUM_ITEMS), dtype=bool)
    np.put_along_axis(is_listed_BI, listed_BE, True, axis=1)
    restrict = LeafFilter.allowing if are_allowed else LeafFilter.excluding

    with torch.inference_mode():
        context = network.encode_context(tensor_batch(histories(histories_of_rows, NUM_ITEMS, ("user",))))
        leaf_filter = restrict(model.trie, torch.from_numpy(listed_BE))
        found = beam_search(model.distribution(context, leaf_filter), BEAMS)
        items_BW = found.items_BW
        log_probs_BWL = item_code_log_probs(model.distribution(context, leaf_filter), items_BW)

    assert num_invalid_items(items_BW.numpy()) == 0
    assert (np.take_along_axis(is_listed_BI, items_BW.numpy(), axis=1) == are_allowed).all()
    # Asked about each item anew, along no beam: the caches of every beam were its own.
    torch.testing.assert_close(found.log_probs_BW, log_probs_BWL.sum(2), rtol=1e-4, atol=1e-4)

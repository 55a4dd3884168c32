"""A catalogue's worth of beams, held to the one thing that must never fail: they are items."""

import numpy as np
import torch

from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.prefixes import ItemDistribution
from rayrec.models.decoding.trie import CodeTrie

NUM_ITEMS, NUM_CODES, NUM_LEVELS = 12_101, 256, 3
NUM_ROWS, BEAMS, BATCH = 200, 5_000, 20


def keys(codes: np.ndarray) -> np.ndarray:
    """One number for each tuple of codes."""
    return codes @ (NUM_CODES ** np.arange(codes.shape[-1]))


def test_a_million_decoded_beams_hold_no_invalid_item():
    """Each prefix that the model is asked about begins an item, and each beam is another item of its row."""
    random = np.random.default_rng(0)
    codes_IL = np.unique(random.integers(NUM_CODES, size=(2 * NUM_ITEMS, NUM_LEVELS)), axis=0)
    codes_IL = random.permutation(codes_IL)[:NUM_ITEMS]
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
        is_item_BW = (items_BW >= 0) & (items_BW < NUM_ITEMS)
        is_new_BW = np.diff(np.sort(items_BW, axis=1), axis=1, prepend=-1) > 0
        num_invalid += int((~(is_item_BW & is_new_BW)).sum())
        num_beams += items_BW.size

    assert num_beams == 1_000_000
    assert num_asked > 100_000
    assert num_invalid == 0

"""Which items the words and values of a catalog are counted in, and how a run's state says so.

Axes: I items.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.features import trains_on_its_events
from rayrec.platform.arrays import BoolArray
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset


def counted_items(config: RunConfig, dataset: Dataset) -> BoolArray:
    """[I] those with training events; all where the data set does not know which these are."""
    counts_I = dataset.items.train_counts_I
    if not trains_on_its_events(config):
        return np.ones(len(counts_I), dtype=np.bool_)
    counted_I: BoolArray = counts_I > 0
    return counted_I


def packed(counted_I: BoolArray) -> str:
    """A bit for each item, in the order of their ids, compressed, as text."""
    return base64.b64encode(zlib.compress(np.packbits(counted_I).tobytes())).decode()


def unpacked(text: str, num_items: int) -> BoolArray:
    """[I] what `packed` wrote.

    Raises:
        InputError: it was written of another number of items.
    """
    bits = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    if len(bits) != -(-num_items // 8):
        raise InputError(
            f"the run counted words in a catalog of about {8 * len(bits)} items, of which {num_items} are "
            "known here; use the data set and the semantic IDs that it was trained with, or extend these"
        )
    return np.unpackbits(bits, count=num_items).astype(np.bool_)

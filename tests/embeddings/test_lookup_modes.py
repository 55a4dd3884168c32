"""Where a trainer's cache is, by its device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import AdamConfig, TableConfig
from rayrec.embeddings.lookup.cache.cached_lookups import CachedLookups
from rayrec.embeddings.lookup.cache.row_cache import RowCache
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import TrainerLink
from rayrec.embeddings.lookup.modes import LookupSettings, caches_on, make_lookups
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.transport.client import ShardClient
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.sequence.item_losses import CrossEntropy
from rayrec.models.sequence.next_item import DenseNextItemModel
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.platform.devices import Device, device_named
from rayrec.platform.schedule import RateSchedule
from tests.embeddings.sparse_runs import AdversarialTransport, Board, ThreadExchange, make_shards
from tests.models.networks import CPU, DIM, backbone, shares

HOST = device_named("cpu")
ACCELERATOR = replace(HOST, has_own_memory=True)
"""One whose memory is the host's after all."""

TABLES = (TableConfig(name="user", dim=DIM, optimizer=AdamConfig(lr=0.05), weight_dtype="bfloat16"),)
NUM_ITEMS = 9
ROWS = [[1, 4, 2], [3, 5], [0, 8, 7, 6], [2, 3]]
NUM_STEPS = 5


def trained(settings: LookupSettings, device: Device) -> tuple[list[float], np.ndarray, set[type]]:
    """(losses, rows at the end, what the dense program was given) of a training on one trainer."""
    transport = AdversarialTransport(make_shards(TABLES, 1), seed=0)
    mode = make_lookups(settings, TrainerLink(TABLES, ShardMap(1), transport), None, caches_on(device))
    torch.manual_seed(0)
    optimizer = DenseOptimizerSettings(0.01, 0.01, RateSchedule(), max_grad_norm=None, fused=True)
    program = SequenceProgram(
        DenseNextItemModel(backbone(0.3), CrossEntropy(), NUM_ITEMS, DIM), optimizer, CPU, seed=5
    )
    batches = [shares(ROWS, NUM_ITEMS, tables=("user",), step=step)[0] for step in range(NUM_STEPS)]
    losses, given = [], set()
    for step, features in enumerate(batches):
        if step + 1 < NUM_STEPS:
            mode.prefetch(step + 1, batches[step + 1].lookups)
        rows = mode.rows(step, features.lookups)
        given |= {type(rows_MD) for rows_MD in rows.values()}
        gradients = program.backward(features, rows)
        mode.update(step, features.lookups, gradients.row_grads)
        program.update()
        losses.append(gradients.loss_sum)
    mode.drain()
    ids_M = batches[0].lookups["user"].ids_M
    return losses, ShardClient(TABLES, ShardMap(1), transport).read({"user": ids_M})["user"], given


def test_only_an_only_trainer_holds_what_batches_share():
    link = TrainerLink(TABLES, ShardMap(1), AdversarialTransport(make_shards(TABLES, 1), seed=0))

    def mode(exchange, **settings):
        return type(make_lookups(LookupSettings(**settings), link, exchange)._mode)

    two = ThreadExchange(Board(2), 0)
    assert (mode(None), mode(two)) == (SharedRowWriteBack, ExactPrefetch)
    assert (mode(None, cache_rows=1), mode(two, cache_rows=1)) == (CachedLookups, CachedLookups)


def test_a_cache_is_where_the_device_computes():
    assert caches_on(HOST) is RowCache
    assert trained(LookupSettings(cache_rows=4), HOST)[2] == {np.ndarray}
    assert trained(LookupSettings(cache_rows=4), ACCELERATOR)[2] == {torch.Tensor}


@pytest.mark.parametrize("cache_rows", [2, 4])
def test_a_training_with_rows_on_a_device_has_the_bits_of_sync(cache_rows):
    expected_losses, expected_MD, _ = trained(LookupSettings("sync"), HOST)

    losses, rows_MD, _ = trained(LookupSettings(cache_rows=cache_rows), ACCELERATOR)

    assert losses == expected_losses
    assert rows_MD.tobytes() == expected_MD.tobytes()

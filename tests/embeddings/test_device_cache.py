"""Rows in a device's memory have the bits of rows in the host's, on every device that this machine has."""

import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rayrec
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.capacity import device_batch_bytes
from rayrec.embeddings.config import RowwiseAdagradConfig, SgdConfig, TableConfig
from rayrec.embeddings.lookup.cache.cached_lookups import CachedLookups
from rayrec.embeddings.lookup.cache.cached_records import on_host
from rayrec.embeddings.lookup.cache.device_cache import device_caches
from rayrec.embeddings.lookup.cache.row_cache import NOT_CACHED, RowCache
from rayrec.embeddings.lookup.lookups import SyncLookups, TrainerLink
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from rayrec.embeddings.optim import device_kernels
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.platform.devices import KINDS, device_named, why_missing
from tests.embeddings.admission_runs import OPTIMIZERS
from tests.embeddings.sparse_runs import ITEMS, alone, make_shards

CPU = torch.device("cpu")


DEVICES = [device_named(kind).torch for kind in KINDS if why_missing(kind) is None]
DTYPES = ("float32", "bfloat16", "float16")


def random_records(config: TableConfig, ids_M: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As a table would hold them after steps that left numbers of any size."""
    ops = RowOperations(config)
    records_MW = ops.new_records(ids_M)
    first, size = ops.layout.weight_words, ops.layout.state_size
    state_MS = np.exp(rng.uniform(-30, 5, (len(ids_M), size))).astype(np.float32)
    records_MW[:, first : first + size] = state_MS.view(np.int32)
    records_MW[:, -1] = rng.integers(0, 100, len(ids_M))  # updates so far
    return records_MW


def random_gradients(num_rows: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """Zeros and numbers of all sizes: some make 16-bit weights overflow, some vanish in a sum."""
    grads_MD = rng.standard_normal((num_rows, dim)) * 10.0 ** rng.uniform(-12, 6, (num_rows, 1))
    return (grads_MD * rng.integers(0, 2, (num_rows, 1 + dim))[:, 1:]).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_device_that_is_here_is_compared(kind):
    if (missing := why_missing(kind)) is not None:
        pytest.skip(f"no bits are compared on {kind}: {missing}")
    assert device_named(kind).torch in DEVICES


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda config: config.kind)
@pytest.mark.parametrize("dim", [1, 7, 16, 50, 64])
def test_rows_of_a_device_have_the_bits_of_the_hosts(optimizer, dtype, dim, device):
    config = TableConfig(
        name="items", dim=dim, seed=5, optimizer=optimizer, weight_dtype=dtype, init_scale=0.5
    )
    rng = np.random.default_rng(dim)
    ids_M = rng.permutation(np.concatenate([np.arange(-40, 40), [-(2**63), 2**63 - 1]]))
    records_MW = random_records(config, ids_M, rng)
    host, other = RowCache(config, len(ids_M)), device_caches(device)(config, len(ids_M))
    slots_M = host.insert(ids_M, records_MW)[0]
    assert (other.insert(ids_M, records_MW)[0] == slots_M).all()

    for step in (*range(6), 2**31 - 1):
        some = rng.permutation(len(ids_M))[: rng.integers(1, len(ids_M))]
        grads_MD = random_gradients(len(some), dim, rng)
        host.apply(slots_M[some], ids_M[some], grads_MD, step)
        other.apply(slots_M[some], ids_M[some], torch.tensor(grads_MD, device=device), step)

        # Some ids have no row, here as there.
        asked_M = np.where(rng.random(len(ids_M)) < 0.2, NOT_CACHED, slots_M)
        weights_MD = other.gather(asked_M, ids_M)
        assert (weights_MD.device.type, weights_MD.dtype) == (device.type, torch.float32)
        assert weights_MD.cpu().numpy().tobytes() == host.gather(asked_M, ids_M).tobytes()
    (host_ids, host_records), (ids, records) = host.take_changed(), other.take_changed()
    assert (ids.tolist(), records.tobytes()) == (host_ids.tolist(), host_records.tobytes())


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_size_of_number_is_rounded_alike(dtype, device):
    """Steps of plain descent from zero weights give exactly the numbers that are to be rounded."""
    config = TableConfig(name="items", dim=9, optimizer=SgdConfig(lr=1.0), weight_dtype=dtype, init_scale=0.0)
    bits = np.random.default_rng(0).integers(0, 2**32, (40_000, 9), dtype=np.uint32)
    grads_MD = bits.view(np.float32)
    grads_MD[~np.isfinite(grads_MD)] = 65504.0
    # Half of them where float16 changes its spacing, or has no more numbers.
    grads_MD[::2] = np.float32(2.0) ** np.random.default_rng(1).uniform(-30, 17, (20_000, 9)).astype(
        np.float32
    )
    ids_M = np.arange(len(grads_MD))
    host, other = RowCache(config, len(ids_M)), device_caches(device)(config, len(ids_M))
    for cache in (host, other):
        slots_M, _ = cache.insert(ids_M, RowOperations(config).new_records(ids_M))
        cache.apply(slots_M, ids_M, grads_MD, 3)

    assert other.take_changed()[1].tobytes() == host.take_changed()[1].tobytes()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_rows_leave_and_return_as_they_were(device):
    config = TableConfig(name="items", dim=5, optimizer=RowwiseAdagradConfig())
    ids_M = np.arange(6)
    records_MW = random_records(config, ids_M, np.random.default_rng(0))
    cache = device_caches(device)(config, 3)
    slots_M, _ = cache.insert(ids_M[:3], records_MW[:3], changed=True)
    cache.unpin(slots_M)

    slots_M, (left_V, left_VW) = cache.insert(ids_M[3:], records_MW[3:])

    assert (slots_M != NOT_CACHED).all()
    assert left_VW.tobytes() == records_MW[left_V].tobytes()
    assert sorted(left_V) == [0, 1, 2]
    weights_MD = RowOperations(config).weights(records_MW[3:])
    assert cache.gather(slots_M, ids_M[3:]).cpu().numpy().tobytes() == weights_MD.tobytes()
    assert cache.weights(records_MW).device.type == device.type


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_a_cache_gives_is_a_copy(device):
    config = TableConfig(name="items", dim=5, optimizer=RowwiseAdagradConfig())
    ids_M = np.arange(4)
    cache = device_caches(device)(config, 4)
    slots_M, _ = cache.insert(ids_M, random_records(config, ids_M, np.random.default_rng(0)), changed=True)
    weights_MD, (_, records_MW) = cache.gather(slots_M, ids_M), cache.take_changed()
    before = weights_MD.clone(), records_MW.copy()

    cache.apply(slots_M, ids_M, torch.ones(4, 5, device=device), 0)

    assert torch.equal(weights_MD, before[0])
    assert (records_MW == before[1]).all()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    ("grads_MD", "message"),
    [
        (torch.tensor([[1.0, 2.0], [np.inf, 0.0]]), "the gradient of id 8 is inf at element 0"),
        (torch.ones(3, 2), r"float32 of shape \(2, 2\).*got float32 of shape \(3, 2\)"),
        (torch.ones(2, 2, dtype=torch.float64), "got float64"),
    ],
    ids=["infinite", "shape", "dtype"],
)
def test_gradients_on_a_device_are_refused_as_a_server_would(grads_MD, message, device):
    cache = device_caches(device)(TableConfig(name="items", dim=2), 4)

    with pytest.raises(ValueError, match=message):
        cache.check_gradients(np.array([7, 8]), grads_MD.to(device))


class OneTrainer:
    """An exchange with nobody else in it."""

    num_trainers = 1

    def all_to_all(self, parts):
        assert all(isinstance(part, np.ndarray) for part in parts)
        return parts


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("exchange", [None, OneTrainer()], ids=["sole owner", "exchange"])
def test_rows_stay_on_the_device_unless_they_are_exchanged(exchange, device):
    """Of three ids, two fit into the cache, and one has no row until its first update."""
    shards = make_shards(ITEMS, 1)
    link = TrainerLink(ITEMS, ShardMap(1), LocalTransport(shards))
    mode = ThreadedLookups(
        CachedLookups(link, cache_rows=2, exchange=exchange, make_cache=device_caches(device))
    )
    expected = SyncLookups(TrainerLink(ITEMS, ShardMap(1), LocalTransport(make_shards(ITEMS, 1))))
    for step in range(4):
        rows, host_rows = mode.rows(step, alone(1, 2, 3)), expected.rows(step, alone(1, 2, 3))
        if exchange is None:
            assert rows["items"].device.type == device.type
        else:
            assert isinstance(rows["items"], np.ndarray)
        assert on_host(rows["items"]).tobytes() == host_rows["items"].tobytes()
        mode.update(step, alone(1, 2, 3), {"items": rows["items"] * 2})
        expected.update(step, alone(1, 2, 3), {"items": host_rows["items"] * 2})
    mode.drain()
    assert (
        mode.stats.num_cache_hits == 2 * 2
    )  # from the third step on; the first two made and fetched the rows
    mode.close()


def test_a_cache_that_a_device_cannot_hold_names_its_table(monkeypatch):
    config = TableConfig(name="items", dim=2)
    cache = device_caches(CPU)(config, 1000)

    def no_memory(*shape, **options):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(MemoryError, match=r"'items': the device has no .* for a cache of 1,000 rows"):
        cache.insert(np.arange(1), RowOperations(config).new_records(np.arange(1)))


class LiveBytes(TorchDispatchMode):
    """Memory of the tensors that operations made and that are still there, and the most of it so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in self._storages:
                self._storages.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        return result

    def _gone(self, address: int, num_bytes: int) -> None:
        self._storages.remove(address)
        self.now -= num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda config: config.kind)
def test_a_batch_takes_no_more_of_a_device_than_was_planned(optimizer, dtype, monkeypatch):
    # As on an accelerator, which needs no float64 for it.
    monkeypatch.setattr(device_kernels, "root", torch.sqrt)
    config = TableConfig(name="items", dim=64, optimizer=optimizer, weight_dtype=dtype)
    ids_M = np.arange(4000)
    cache = device_caches(CPU)(config, len(ids_M))
    slots_M, _ = cache.insert(ids_M, RowOperations(config).new_records(ids_M))

    with LiveBytes() as live:
        rows_MD = cache.gather(slots_M, ids_M)
        cache.apply(slots_M, ids_M, rows_MD * 2, 0)

    planned = device_batch_bytes([config], {"items": len(ids_M)}, cache_rows=len(ids_M))
    assert 0.5 * planned < live.most < planned


def test_the_order_of_a_sum_is_that_of_the_compiled_kernel():
    """Of numbers so unlike each other that any other order gives another sum, nearly always."""
    values_MD = torch.tensor(random_gradients(200, 37, np.random.default_rng(0)))

    backwards_M = device_kernels.sum_squares(values_MD.flip(1))

    assert not torch.equal(device_kernels.sum_squares(values_MD), backwards_M)


def test_a_run_without_an_accelerator_imports_no_torch_into_the_sparse_engine():
    package = Path(rayrec.__file__).parent
    names = [
        ".".join(("rayrec", *path.relative_to(package).with_suffix("").parts))
        for path in sorted((package / "embeddings").rglob("*.py"))
        if not path.name.startswith(("device_", "__"))
    ]
    program = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

"""Records of products, and the store that keeps them: what cannot be used is not there."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.nearline.product_store import ProductStore, Work
from rayrec.pipelines.nearline.products import (
    CorruptRecordError,
    ForeignRecordError,
    Product,
    ProductKey,
    decoded,
    encoded,
)
from rayrec.platform.errors import UnavailableError
from rayrec.samples.stores import open_values

KEY = ProductKey("candidates", "ab" * 16, -7)
PRODUCT = Product(
    2**64 - 1,
    3,
    12.5,
    {"items": np.arange(3), "scores": np.zeros((0, 2), np.float32), "x": np.ones((2, 1, 2))},
)
RECORD = encoded(KEY, PRODUCT)


class Values:
    """A store that can be down."""

    name = "values"

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.error: Exception | None = None
        self.asked = 0

    def read_many(self, names):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return [self.kept.get(name) for name in names]

    def write_many(self, changes):
        for name, content in changes.items():
            if content is None:
                self.kept.pop(name, None)
            else:
                self.kept[name] = content

    def names_after(self, prefix):
        return iter(sorted(name for name in self.kept if name.startswith(prefix)))

    def close(self):
        pass


def same(product):
    assert product is not None
    assert (product.events_hash, product.num_events, product.made_at) == (2**64 - 1, 3, 12.5)
    for name, array in PRODUCT.arrays.items():
        np.testing.assert_array_equal(product.arrays[name], array)
        assert product.arrays[name].dtype == array.dtype


def test_a_record_comes_back_as_it_was():
    same(decoded(KEY, RECORD))


@given(st.integers(0, len(RECORD) - 1), st.integers(1, 255))
def test_a_changed_byte_is_never_read(place, change):
    changed = bytearray(RECORD)
    changed[place] ^= change
    with pytest.raises((CorruptRecordError, ForeignRecordError)):
        decoded(KEY, bytes(changed))


@given(st.integers(0, len(RECORD) - 1))
def test_a_half_written_record_is_never_read(size):
    with pytest.raises(CorruptRecordError):
        decoded(KEY, RECORD[:size])


@pytest.mark.parametrize(
    "key",
    [KEY._replace(kind="neighbors"), KEY._replace(identity="cd" * 16), KEY._replace(user=7)],
    ids=["kind", "version", "user"],
)
def test_a_record_of_something_else_is_never_read(key):
    with pytest.raises((CorruptRecordError, ForeignRecordError)):
        decoded(key, RECORD)


def test_products_lie_in_a_folder_and_versions_are_removed(tmp_path):
    store = ProductStore(open_values(tmp_path / "products", create=True))
    other = KEY._replace(identity="cd" * 16)
    store.put_many({KEY: PRODUCT, other: PRODUCT}, {f"{KEY.identity}:0": "5:ab"})

    found = store.get_many([KEY, other, KEY._replace(user=8)])
    same(found[0])
    same(found[1])
    assert found[2] is None
    assert store.position(f"{KEY.identity}:0") == "5:ab"
    assert store.identities() == {KEY.identity, other.identity}
    assert store.remove(KEY.identity) == 1
    assert store.position(f"{KEY.identity}:0") is None
    assert store.identities() == {other.identity}
    store.close()


def test_what_cannot_be_used_is_missing_and_counted_and_said_once_a_minute(caplog):
    values, now = Values(), [0.0]
    store = ProductStore(values, clock=lambda: now[0])
    store.put_many({KEY: PRODUCT})
    (name,) = values.kept
    values.kept[name] = RECORD[:-3]
    with caplog.at_level(logging.WARNING):
        for now[0] in (0.0, 30.0, 61.0):
            assert store.get_many([KEY]) == [None]
    assert store.unusable == {"down": 0, "corrupt": 3, "foreign": 0}
    assert len(caplog.messages) == 2
    values.kept[name] = encoded(KEY._replace(user=8), PRODUCT)
    assert store.get_many([KEY]) == [None]
    assert store.unusable["foreign"] == 1


@pytest.mark.parametrize("error", [UnavailableError("values", 1, "gone"), OSError("disk")])
def test_a_store_that_is_down_is_not_waited_for(error):
    values, now = Values(), [0.0]
    store = ProductStore(values, pause_s=1.0, clock=lambda: now[0])
    store.put_many({KEY: PRODUCT})
    values.error = error
    assert store.get_many([KEY, KEY]) == [None, None]
    assert store.get_many([KEY]) == [None]
    assert values.asked == 1
    assert store.unusable["down"] == 3
    values.error, now[0] = None, 2.0
    same(store.get_many([KEY])[0])


def test_a_run_keeps_the_products_of_its_newest_versions_and_of_nobody_else(tmp_path):
    store = ProductStore(open_values(tmp_path / "products", create=True))
    first, second, third, foreign = (
        KEY._replace(identity=letters * 16) for letters in ("aa", "bb", "cc", "dd")
    )
    store.put_many(dict.fromkeys((first, second, third, foreign), PRODUCT))

    assert store.keep_newest("run", [first.identity], 2) == 0
    assert store.keep_newest("run", [second.identity], 2) == 0
    assert store.keep_newest("run", [first.identity], 2) == 0  # somebody went back
    assert store.keep_newest("run", [third.identity], 2) == 1

    assert store.identities() == {first.identity, third.identity, foreign.identity}
    assert store.keep_newest("run", [third.identity], 2) == 0


def test_the_work_of_all_workers_of_a_version_is_added_up(tmp_path):
    store = ProductStore(open_values(tmp_path / "products", create=True))
    works = (Work(10, 0.5, 3), Work(30, 1.5, 0))
    names = [f"{KEY.identity}:work:{part}of2" for part in range(2)]
    store.put_many({}, {name: work.to_text() for name, work in zip(names, works, strict=True)})

    assert store.work(KEY.identity) == Work(40, 2.0, 3)
    assert store.work("cd" * 16) == Work(0, 0.0, 0)


def test_a_version_is_covered_as_far_as_the_worker_that_has_done_least(tmp_path):
    store = ProductStore(open_values(tmp_path / "products", create=True))

    def note(**shares):
        store.put_many({}, {f"{KEY.identity}:coverage:{name}": share for name, share in shares.items()})

    assert store.coverage(KEY.identity) == 0.0
    note(**{"summaries:aa:0of2": "1.0"})
    assert store.coverage(KEY.identity) == 0.0  # the other one has not begun
    note(**{"summaries:aa:1of2": "0.4"})
    assert store.coverage(KEY.identity) == 0.4
    note(**{"candidates:aa:0of1": "0.3"})
    assert store.coverage(KEY.identity) == 0.3

    note(**{"summaries:aa:0of1": "0.9", "summaries:bb:0of1": "0.1"})
    store.forget_others(f"{KEY.identity}:coverage:summaries:aa:0of1")
    note(**{"candidates:aa:0of1": "1.0"})
    assert store.coverage(KEY.identity) == 0.9

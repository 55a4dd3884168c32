import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.tokenizers.extend import NewItems, extend_registry
from rayrec.models.tokenizers.fit import quantized_registry
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from tests.helpers.examples import examples


def on_a_line():
    """Level 0 at 0 and 100, level 1 at 0 and 10: vectors are numbers."""
    books = np.array([[[0.0], [100.0]], [[0.0], [10.0]]], dtype=np.float32)
    return ResidualKMeans(2, codebook_size=2).restore({"codebooks_LKD": books})


def registry_of(values, policy, ids=None):
    ids_I = np.arange(len(values)) if ids is None else np.array(ids)
    vectors_ID = torch.tensor([[float(value)] for value in values])
    return quantized_registry(on_a_line(), vectors_ID, ids_I, "old data", policy, tokenizer_version="t")


def extended(registry, new, ids_I=None, fingerprint="new data"):
    """`new`: id to value."""
    ids_N = np.array(sorted(new))
    vectors_ND = torch.tensor([[float(new[ident])] for ident in sorted(new)]).reshape(len(new), 1)
    everything = np.sort(np.concatenate([registry.item_ids_I, ids_N])) if ids_I is None else np.array(ids_I)
    return extend_registry(registry, on_a_line(), NewItems(ids_N, vectors_ND), everything, fingerprint)


def codes_of(registry, ident):
    return registry.codes_IL[registry.item_ids_I.tolist().index(ident)].tolist()


@pytest.mark.parametrize("policy", ["extra_digit", "reassign", "share"])
def test_items_that_were_there_keep_their_codes_and_new_ones_get_their_own(policy):
    registry = registry_of([0, 110], policy, ids=[5, 9])
    # The new catalog has an order of its own.
    grown = extended(registry, {7: 100}, ids_I=[9, 7, 5])

    assert grown.item_ids_I.tolist() == [9, 7, 5]
    for ident in (5, 9):
        assert codes_of(grown, ident) == codes_of(registry, ident)
    assert codes_of(grown, 7)[:2] == [1, 0]
    assert grown.dataset_fingerprint == "new data"
    assert grown.version != registry.version
    assert grown.tokenizer_version == "t"
    assert grown.extends(registry.version, "old data")
    assert not grown.extends(registry.version, "other data")
    assert not registry.extends(grown.version, "new data")


def test_an_extra_digit_counts_on_as_far_as_the_level_goes():
    registry = registry_of([0, 0, 10], "extra_digit")
    assert registry.level_sizes == (2, 2, 2)

    grown = extended(registry, {10: 10, 12: 100})

    assert codes_of(grown, 10) == [0, 1, 1]
    assert codes_of(grown, 12) == [1, 0, 0]
    assert grown.level_sizes == registry.level_sizes


def test_an_item_without_room_moves_to_the_nearest_tuple_and_is_counted():
    registry = registry_of([0, 0, 110], "extra_digit")
    grown = extended(registry, {10: 1})

    assert codes_of(grown, 10) == [0, 1, 0]
    assert grown.report()["extension"] == {"items": 1, "without_data": 0, "moved_to_another_tuple": 1}


def test_a_prefix_without_room_is_refused_with_the_way_out():
    registry = registry_of([0, 10, 110], "reassign")
    with pytest.raises(
        ValueError, match=r"new item 10: all 2 tuples under its prefix \[0\] are taken.*share"
    ):
        extended(registry, {10: 1})


def test_a_tuple_that_is_shared_has_room_for_any_number():
    registry = registry_of([0, 110], "share")
    grown = extended(registry, {10: 0, 11: 1, 12: 2})

    assert [codes_of(grown, ident) for ident in (0, 10, 11, 12)] == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
    ]
    assert grown.level_sizes == (2, 2, 4)
    assert grown.learned_level_sizes == registry.learned_level_sizes == (2, 2)
    assert grown.report()["collisions"] == {"items": 4, "groups": 1, "largest_group": 4}


def test_an_extension_can_be_extended_and_saved(tmp_path):
    registry = registry_of([0, 110], "share")
    once = extended(registry, {10: 0})
    twice = extended(once, {20: 0}, fingerprint="newer data")
    twice.save(tmp_path)
    loaded = SemanticIdRegistry.load(tmp_path)

    assert loaded.version == twice.version
    assert [ancestor.version for ancestor in loaded.ancestors] == [registry.version, once.version]
    assert loaded.extends(registry.version, "old data")
    assert loaded.extends(once.version, "new data")
    assert loaded.report()["extension"]["items"] == 2


def test_a_catalog_that_lost_an_item_is_refused():
    registry = registry_of([0, 110], "share", ids=[5, 9])
    with pytest.raises(
        ValueError, match=r"1 of the 2 items that have semantic IDs are not in the new catalog"
    ):
        extended(registry, {7: 0}, ids_I=[5, 7])
    with pytest.raises(ValueError, match="the 1 new items are not those that the registry lacks"):
        extended(registry, {7: 0}, ids_I=[5, 8, 9])


def test_a_catalog_of_the_same_items_keeps_all_codes():
    registry = registry_of([0, 110], "extra_digit")
    same = extended(registry, {})
    assert np.array_equal(same.codes_IL, registry.codes_IL)
    assert same.extends(registry.version, "old data")


@examples(25)
@given(st.integers(0, 10_000))
def test_codes_stay_distinct_however_a_catalog_grows(seed):
    random = np.random.default_rng(seed)
    registry = registry_of(random.integers(0, 120, 12), "share")
    grown = extended(registry, dict(zip(range(50, 56), random.integers(0, 120, 6).tolist(), strict=True)))

    assert len(np.unique(grown.codes_IL, axis=0)) == 18
    assert np.array_equal(grown.codes_IL[:12], registry.codes_IL)
    assert grown.learned_level_sizes == registry.learned_level_sizes

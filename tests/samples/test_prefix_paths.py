import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.code_tree import CodeTree, prefix_ids
from rayrec.platform.hashing import combine64
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.prefix_paths import PrefixPaths
from tests.helpers.data import sample_batch

catalogs = st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=40)


def children_of(codes_IL: np.ndarray, prefix: tuple[int, ...]) -> set[int]:
    below_I = (codes_IL[:, : len(prefix)] == prefix).all(axis=1)
    return set(codes_IL[below_I, len(prefix)].tolist())


@given(catalogs, st.data())
def test_targets_are_told_apart_from_all_children_along_their_paths(codes, data):
    codes_IL = np.array(codes)
    targets_N = np.array(data.draw(st.lists(st.integers(0, len(codes) - 1), min_size=1, max_size=8)))

    levels, ids = PrefixPaths(codes_IL, None, None, seed=0).levels(0, targets_N)

    first = 0
    for depth, level in enumerate(levels):
        ids_C = ids[first : first + len(level.codes_C)]
        first += len(ids_C)
        for n, target in enumerate(targets_N):
            prefix = tuple(codes_IL[target, :depth].tolist())
            start, stop = level.offsets_P1[level.parents_N[n] :][:2]
            found = level.codes_C[start:stop].tolist()
            assert sorted(found) == sorted(children_of(codes_IL, prefix))
            wanted = [combine64(*prefix, code) for code in found]
            assert ids_C[start:stop].view(np.uint64).tolist() == [int(each) for each in wanted]
            assert start <= level.targets_N[n] < stop, "where all are alternatives, the target is one of them"
            assert level.codes_C[level.targets_N[n]] == codes_IL[target, depth]
        assert not level.log_shares_P.any()
    assert first == len(ids)


@given(catalogs, st.integers(1, 3), st.data())
def test_samples_are_so_many_children_and_the_same_in_every_share(codes, num_siblings, data):
    codes_IL = np.array(codes)
    draw = st.lists(st.integers(0, len(codes) - 1), min_size=1, max_size=8)
    targets = [np.array(data.draw(draw)), np.array(data.draw(draw))]
    paths = PrefixPaths(codes_IL, num_siblings, None, seed=0)

    shares = [paths.levels(3, targets_N)[0] for targets_N in targets]

    drawn = {}
    for levels, targets_N in zip(shares, targets, strict=True):
        for depth, level in enumerate(levels):
            for n, target in enumerate(targets_N):
                prefix, parent = tuple(codes_IL[target, :depth].tolist()), level.parents_N[n]
                children = children_of(codes_IL, prefix)
                found = level.codes_C[level.offsets_P1[parent] : level.offsets_P1[parent + 1]].tolist()
                assert len(found) == len(set(found)) == min(num_siblings, len(children))
                assert set(found) <= children
                assert drawn.setdefault(prefix, found) == found
                share = np.log(len(found) / len(children))
                np.testing.assert_allclose(level.log_shares_P[parent], share, rtol=1e-6)
                assert level.codes_C[level.targets_N[n]] == codes_IL[target, depth]


@pytest.mark.slow
def test_each_child_is_sampled_equally_often():
    codes_IL = np.array([[code] for code in range(6)])
    paths = PrefixPaths(codes_IL, 2, None, seed=0)

    counts = np.zeros(6)
    for step in range(3000):
        (level,), _ = paths.levels(step, np.array([0]))
        np.add.at(counts, level.codes_C[:2], 1)

    np.testing.assert_allclose(counts / counts.sum(), 1 / 6, atol=0.01)


def test_prefixes_without_training_events_are_no_alternatives_but_for_codes_of_no_meaning():
    codes_IL = np.array([[0, 0], [0, 1], [1, 1], [2, 1], [2, 2]])
    trained_I = np.array([True, False, True, False, False])

    (first, second), _ = PrefixPaths(codes_IL, None, trained_I, seed=0).levels(0, np.array([0, 2]))

    assert first.codes_C.tolist() == [0, 1, 2], "no trained item has the first code 2"
    assert second.codes_C.tolist() == [0, 1], "the code 1 has a meaning, and (0, 1) leads to no trained item"


def test_a_target_without_counted_events_is_a_candidate_all_the_same():
    codes_IL, trained_I = np.array([[0, 0], [0, 1], [1, 0]]), np.array([False, True, True])

    (_, level), ids = PrefixPaths(codes_IL, None, trained_I, seed=0).levels(0, np.array([0, 1, 0]))

    assert level.codes_C.tolist() == [1, 0]
    assert level.offsets_P1.tolist() == [0, 1]
    assert level.targets_N.tolist() == [1, 0, 1]
    assert ids[-2:].tolist() == prefix_ids(codes_IL)[[1, 0], 1].tolist()


def test_ids_of_nodes_are_those_of_their_items_prefixes():
    codes_IL = np.random.default_rng(0).integers(0, 5, (50, 3))
    tree = CodeTree.of(codes_IL)

    for depth in range(1, 4):
        assert set(tree.prefix_ids(depth).tolist()) == set(prefix_ids(codes_IL)[:, depth - 1].tolist())
        assert len(tree.prefix_ids(depth)) == tree.num_nodes(depth)


@pytest.mark.parametrize("num_trainers", [1, 3])
def test_a_lookup_has_the_prefixes_of_items_then_the_candidates(num_trainers):
    codes_IL = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    paths = PrefixPaths(codes_IL, None, None, seed=0)
    features = SequenceFeatures(
        np.arange(4), max_length=4, tables=("prefix",), paths=paths, num_trainers=num_trainers
    )

    batches = features(sample_batch([[0, 1, 2], [3, 0], [2, 2, 1, 0]]))

    named = set()
    for batch in batches:
        lookup = batch.lookups["prefix"]
        of_items = prefix_ids(codes_IL[batch.items_N]).reshape(-1)
        levels, candidates = paths.levels(0, batch.targets_N)
        assert lookup.ids_M[lookup.inverse].tolist() == [*of_items, *candidates]
        assert [level.codes_C.tolist() for level in batch.paths] == [each.codes_C.tolist() for each in levels]
        named |= set(lookup.ids_M.tolist())
    assert all(set(batch.lookups["prefix"].updated_ids.tolist()) == named for batch in batches)


def test_ranking_reads_the_prefixes_of_items_alone():
    codes_IL = np.array([[0, 0], [0, 1], [1, 0]])
    paths = PrefixPaths(codes_IL, None, None, seed=0)
    features = SequenceFeatures(np.arange(3), max_length=4, tables=("prefix",), paths=paths)

    batch = features.ranking(sample_batch([[0, 2]]))

    lookup = batch.lookups["prefix"]
    assert lookup.ids_M[lookup.inverse].tolist() == prefix_ids(codes_IL[[0, 2]]).reshape(-1).tolist()
    assert batch.paths == ()


def test_a_batch_without_targets_reads_no_candidates():
    levels, ids = PrefixPaths(np.array([[0, 0], [0, 1]]), 1, None, seed=0).levels(0, np.zeros(0, np.int64))

    assert [len(level.codes_C) for level in levels] == [0, 0]
    assert len(ids) == 0

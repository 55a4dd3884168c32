"""Vectors and codes of catalogs in files: those of one process, and the same bits however it is divided."""

import errno
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from rayrec.models.tokenizers.fit import VARIANCE
from rayrec.models.tokenizers.item_tokenizer import ItemTokenizer
from rayrec.models.tokenizers.item_vectors import interaction_vectors
from rayrec.models.tokenizers.out_of_core import components, preparation, row_files
from rayrec.models.tokenizers.out_of_core.catalog import TokenizerSettings, tokenize_blocks
from rayrec.models.tokenizers.out_of_core.neighbors import (
    NeighborFiles,
    bounds_of_parts,
    gather_totals,
    merge_part,
    pair_counts,
    spill_pairs,
    weights_of,
    write_information,
)
from rayrec.models.tokenizers.out_of_core.preparation import Sources, fit_preparation
from rayrec.models.tokenizers.out_of_core.row_files import Blocks, ColumnFiles, RowFiles, write_array
from rayrec.models.tokenizers.vector_preparation import VectorPreparation
from rayrec.platform.errors import NoRoomError
from tests.models.tokenizers.vectors import item_like_vectors


def run(stage, task, shared, arguments):
    return [task(shared, argument) for argument in arguments]


def communities(num_items=60, size=6, num_sequences=300, seed=0):
    """Items of a community occur together, and a tenth of the events is anything; the last item never is."""
    rng = np.random.default_rng(seed)
    events, offsets = [], [0]
    for _ in range(num_sequences):
        first = size * rng.integers(num_items // size - 1)
        items = first + rng.permutation(size)
        noise = rng.random(size) < 0.1
        events.append(np.where(noise, rng.integers(0, num_items - 1, size), items))
        offsets.append(offsets[-1] + size)
    return np.concatenate(events), np.array(offsets)


def vectors_in_files(folder, positions_N, offsets_B1, num_items, dim, blocks, num_parts, pieces, per_task=2):
    folder.mkdir()
    files = NeighborFiles(folder, num_items, 5, bounds_of_parts(num_items, num_parts, 1))
    cuts = np.linspace(0, len(offsets_B1) - 1, pieces + 1).astype(int)
    starts = [
        spill_pairs(
            files, piece, positions_N[offsets_B1[a] : offsets_B1[b]], offsets_B1[a : b + 1] - offsets_B1[a]
        )
        for piece, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    for part in range(files.num_parts):
        merge_part(files, part, [(each[part], each[part + 1]) for each in starts])
    context_sum = gather_totals(files)
    for part in range(files.num_parts):
        write_information(files, part, context_sum)
    return components.interaction_rows(files, blocks, dim, 0, "vectors", run, per_task).read(0, num_items)


def test_vectors_are_those_of_one_process_up_to_a_rotation(tmp_path, monkeypatch):
    monkeypatch.setattr(components, "ROUNDS", 4)
    events = communities()
    expected_ID = interaction_vectors(*events, num_items=60, dim=8)
    found_ID = vectors_in_files(tmp_path / "a", *events, 60, 8, Blocks(60, 16, 1), 5, 3)

    assert np.isnan(found_ID).all(axis=1).tolist() == np.isnan(expected_ID).all(axis=1).tolist()
    known = ~np.isnan(expected_ID).any(axis=1)
    assert not known.all()
    np.testing.assert_allclose(
        found_ID[known] @ found_ID[known].T, expected_ID[known] @ expected_ID[known].T, atol=2e-4
    )


def test_neither_pieces_nor_parts_nor_tasks_change_a_bit(tmp_path):
    events = communities()
    of = partial(vectors_in_files, positions_N=events[0], offsets_B1=events[1], num_items=60, dim=20)
    one = of(tmp_path / "one", blocks=Blocks(60, 16, 4), num_parts=1, pieces=1)
    many = of(tmp_path / "many", blocks=Blocks(60, 16, 1), num_parts=7, pieces=11, per_task=3)

    assert one.tobytes() == many.tobytes()


def test_pairs_are_counted_by_distance_in_both_directions():
    keys, counts = pair_counts(np.array([0, 1, 2, 2, 0, 3]), np.array([0, 4, 6]), 4, 2)
    matrix = np.zeros((4, 4))
    matrix.reshape(-1)[keys] = counts

    assert weights_of(2) == [2, 1]
    assert matrix.tolist() == [[0, 2, 1, 2], [2, 0, 3, 0], [1, 3, 0, 0], [2, 0, 0, 0]]


def test_weights_of_a_wide_window_are_in_proportion_to_the_distance():
    weights = np.array(weights_of(40))
    assert weights[:4] / weights[0] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-5)


def make_sources(folder, blocks=None, num_items=600, narrow_known=500):
    """Vectors of two sources, one of which does not know all items; 20 items are known to none."""
    folder.mkdir()
    wide = item_like_vectors(num_items, 12).numpy()
    narrow = item_like_vectors(num_items, 5, seed=1, scale=3.0).numpy()
    narrow[narrow_known:] = np.nan
    wide[-20:] = np.nan
    blocks = blocks or Blocks(num_items, 128, 2)
    given = {"wide": wide, "narrow": narrow}
    files = {}
    for name, vectors_ID in given.items():
        files[name] = RowFiles(folder, name, num_items, vectors_ID.shape[1], 100)
        for number, start in enumerate(range(0, num_items, 100)):
            files[name].write(number, vectors_ID[start : start + 100])
    ids_I = np.arange(num_items, dtype=np.int64) * 3
    write_array(folder / "ids.i8", ids_I)
    return Sources(files, folder / "ids.i8", blocks), given, ids_I


def test_preparation_in_blocks_is_that_of_one_process(tmp_path):
    sources, given, ids_I = make_sources(tmp_path / "a")
    weights = {"wide": 2.0}
    expected = VectorPreparation.fit(given, ids_I, weights, 6).apply(given, ids_I).vectors_ID
    fitted = fit_preparation(sources, weights, 6, 0, run)
    found = fitted.apply(given, ids_I).vectors_ID

    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-4)  # directions have no sign
    with pytest.raises(ValueError, match="the narrow vectors know none of 600 items"):
        fit_preparation(make_sources(tmp_path / "b", narrow_known=0)[0], {}, 6, 0, run)


def test_one_covariance_comes_to_the_driver_whatever_number_of_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_STRIP_ROWS", 5)
    received, fitted = {}, []

    def counted(stage, task, shared, arguments):
        results = run(stage, task, shared, arguments)
        if stage in ("products", "covariance"):
            received[stage] = [each for each in results if each is not None]
        return results

    for number, per_task in enumerate((1, 2, 5)):
        folder = tmp_path / str(number)
        sources, _, _ = make_sources(folder, Blocks(600, 50, per_task))
        fitted.append(fit_preparation(sources, {}, 6, 0, counted).components)

        dim = len(fitted[0].mean_D)
        assert received["products"] == []
        assert sum(each.size for each in received["covariance"]) == (1 + dim) * dim
        assert not list(folder.glob("products-*"))
    assert all(np.array_equal(each.directions_DC, fitted[0].directions_DC) for each in fitted)
    # The order of the sum is that of the blocks: the bits of one process that adds them one by one.
    scaled = fit_preparation(sources, {}, 6, 0, run).scaling
    sum_D = np.zeros(dim)
    for block in range(12):
        vectors_RD = scaled.apply(*sources.read(*sources.blocks.span(block))).vectors_ID
        sum_D += torch.from_numpy(vectors_RD).double().sum(dim=0).numpy()
    assert np.array_equal(fitted[0].mean_D, sum_D / 600)


def settings(**changes):
    values = {
        "name": "rq_kmeans",
        "num_levels": 3,
        "codebook_size": 8,
        "max_codebook_size": 256,
        "num_iterations": 5,
        "seed": 0,
        "weights": {},
        "num_components": 6,
        "fit_items": 10_000,
        "collision_policy": "extra_digit",
        "vectors_from": "tests",
    }
    return TokenizerSettings(**(values | changes))


@pytest.mark.parametrize("collisions", ["extra_digit", "share", "reassign"])
def test_codes_of_blocks_are_those_of_the_tokenizer_and_its_collision_policy(collisions, tmp_path):
    sources, given, ids_I = make_sources(tmp_path / "a")
    popularity_I = np.arange(600)
    wanted = settings(collision_policy=collisions, codebook_size=24)
    tokenizer, registry, num_without_data = tokenize_blocks(sources, wanted, "data", popularity_I, run)

    raw_IL = tokenizer.encode(given, ids_I)
    if collisions == "reassign":
        moved_I = (registry.codes_IL != raw_IL).any(axis=1)
        assert 0 < moved_I.sum() < 300
        assert (registry.codes_IL[:, :2] == raw_IL[:, :2]).all()
    else:
        assert (registry.codes_IL[:, :3] == raw_IL).all()
    assert registry.tokenizer_version == tokenizer.version
    assert registry.item_ids_I.tolist() == ids_I.tolist()
    assert num_without_data == 20
    vectors = torch.from_numpy(tokenizer.vectors(given, ids_I).vectors_ID)
    variance = float((vectors - vectors.mean(dim=0)).square().sum(dim=1).mean())
    assert registry.fit_report[VARIANCE] == pytest.approx(variance, rel=1e-4)
    left = float((vectors - tokenizer.quantizer.decode(torch.from_numpy(raw_IL))).square().sum(dim=1).mean())
    assert registry.fit_report["reconstruction_error"][-1] == pytest.approx(left / variance, rel=1e-3)


def test_a_tokenizer_of_blocks_is_saved_and_extends_as_any_other(tmp_path):
    sources, given, ids_I = make_sources(tmp_path / "a")
    tokenizer, _, _ = tokenize_blocks(sources, settings(), "data", np.zeros(600), run)
    tokenizer.save(tmp_path / "saved")
    loaded = ItemTokenizer.load(tmp_path / "saved")

    assert loaded.version == tokenizer.version
    assert (loaded.encode(given, ids_I) == tokenizer.encode(given, ids_I)).all()


def test_codes_do_not_change_with_what_a_task_takes(tmp_path):
    made = [
        tokenize_blocks(
            make_sources(tmp_path / str(per_task), Blocks(600, 64, per_task))[0],
            settings(fit_items=350),
            "data",
            np.zeros(600),
            run,
        )
        for per_task in (1, 4)
    ]

    assert made[0].registry.version == made[1].registry.version
    assert made[0].registry.fit_report["fitted_items"] == 350


def test_rows_in_files_are_read_across_them_and_in_any_order(tmp_path):
    rows_ID = np.arange(30, dtype=np.float32).reshape(10, 3)
    files = RowFiles(tmp_path, "x", 10, 3, 4)
    for number in range(3):
        files.write(number, rows_ID[4 * number : 4 * number + 4])

    assert files.read(2, 9).tolist() == rows_ID[2:9].tolist()
    assert files.take(np.array([9, 0, 5, 0])).tolist() == rows_ID[[9, 0, 5, 0]].tolist()


def test_a_full_disk_is_a_sentence_and_leaves_no_half_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_files.os, "pwrite", full)
    with pytest.raises(NoRoomError, match="its disk is full"):
        ColumnFiles(tmp_path, "c", 4, 2).write(0, np.ones((4, 2), dtype=np.float32))
    monkeypatch.setattr(row_files.os, "replace", full)
    with pytest.raises(NoRoomError, match="make room there"):
        RowFiles(tmp_path, "x", 4, 2, 4).write(0, np.ones((4, 2), dtype=np.float32))
    assert not list(tmp_path.glob("x-*"))

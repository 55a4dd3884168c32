"""Tokenization in tasks: the same codes whatever a task takes and wherever it runs, killed or not."""

import errno
from functools import partial

import numpy as np
import pytest

from rayrec.models.tokenizers.item_tokenizer import ItemTokenizer
from rayrec.models.tokenizers.out_of_core import row_files
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.vector_sources import TextVectors
from rayrec.pipelines.semantic_ids.large_catalog import CatalogSizes, item_rows
from rayrec.pipelines.semantic_ids.tokenization import (
    LargeCatalog,
    TokenizeConfig,
    catalog_size,
    extend,
    tokenize,
)
from rayrec.platform.errors import InputError, NoRoomError
from rayrec.platform.tasks import run_tasks_locally
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import ITEMS_FILE
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source

NUM_ITEMS = 90
SIZES = (
    CatalogSizes(block_rows=16, part_rows=20),
    CatalogSizes(16, 20, blocks_per_task=5, piece_events=50, entries_of_part=100, parts_per_task=3),
)


def make_data(folder):
    folder.mkdir(exist_ok=True)
    events = random_events(150, NUM_ITEMS, seed=1)
    items = {
        "item_id": [f"i{item}" for item in range(NUM_ITEMS)],
        "title": [f"kind {item % 7} of {item}" if item % 5 else None for item in range(NUM_ITEMS)],
    }
    source = write_source(folder / "source", events, items=items)
    prepare(source, folder / "data", PrepareConfig(num_partitions=2, clean=True, rows_per_group=20))
    return folder / "data"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("catalog"))


def of_text(text):
    return np.full(6, np.nan) if not text else np.random.default_rng(sum(text.encode())).standard_normal(6)


def vectors_of_texts(self, items, progress=None):
    assert items.sequences is None, "a part of the items is as new items are"
    return np.array([of_text(text) for text in items.texts], dtype=np.float32)


@pytest.fixture(autouse=True)
def texts_without_a_network(monkeypatch):
    monkeypatch.setattr(TextVectors, "vectors", vectors_of_texts)


def config(**changes):
    values = {"codebook_size": 4, "num_levels": 2, "iterations": 4, "components": 8, "dim": 12}
    return TokenizeConfig(**(values | {"large_catalog": 1, "fit_items": 60} | changes))


def version(path):
    return SemanticIdRegistry.load(path).version


@pytest.mark.slow
@pytest.mark.parametrize("vectors", ["interactions", "text", "both"])
def test_what_a_task_takes_changes_no_bit(vectors, data, tmp_path):
    versions = set()
    for number, sizes in enumerate(SIZES):
        out = tmp_path / str(number)
        report = tokenize(data, out, config(vectors=vectors), large=LargeCatalog(sizes=sizes))
        versions.add(report.report["version"])
        assert report.report["version"] == version(out)
        assert ItemTokenizer.load(out).version == SemanticIdRegistry.load(out).tokenizer_version

    assert len(versions) == 1
    assert report.report["num_items"] == catalog_size(data) == len(Dataset.open(data).items)
    assert "60 items" not in report.report["method"]  # more than asked for: codes need examples
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_killed_tokenization_goes_on_and_ends_with_the_same_bits(data, tmp_path):
    wanted = config(vectors="both")
    expected = tokenize(data, tmp_path / "whole", wanted, large=LargeCatalog(sizes=SIZES[1])).report[
        "version"
    ]
    done = []

    def killed_after(most, task, shared, arguments):
        for index, result in run_tasks_locally(task, shared, arguments):
            if len(done) == most:
                raise KeyboardInterrupt
            done.append(task)
            yield index, result

    def interrupted(most):
        done.clear()
        return LargeCatalog(partial(killed_after, most), resume=True, sizes=SIZES[1])

    for most in (3, 9, 90, 200):
        with pytest.raises(KeyboardInterrupt):
            tokenize(data, tmp_path / "ids", wanted, large=interrupted(most))
        assert not (tmp_path / "ids").exists()
    other = config(vectors="both", num_levels=3)
    with pytest.raises(InputError, match=r"a tokenization that was interrupted .*go on with it \(--resume\)"):
        tokenize(data, tmp_path / "ids", wanted, large=LargeCatalog(sizes=SIZES[1]))
    with pytest.raises(InputError, match="num_levels is 3, but the interrupted tokenization began with 2"):
        tokenize(data, tmp_path / "ids", other, large=interrupted(10_000))
    found = tokenize(data, tmp_path / "ids", wanted, large=interrupted(10_000))

    assert found.report["version"] == expected
    assert not {"_spill_piece", "_merge_part"} & {task.__name__ for task in done}, "these were done"


def test_new_items_get_codes_of_a_tokenizer_of_a_large_catalog(data, tmp_path):
    tokenize(data, tmp_path / "ids", config(vectors="text"), large=LargeCatalog(sizes=SIZES[0]))
    extended = extend(data, tmp_path / "ids", tmp_path / "more")
    assert extended.report["num_items"] == catalog_size(data)


def test_what_cannot_be_clustered_is_a_sentence_and_leaves_nothing(data, tmp_path):
    with pytest.raises(InputError, match=r"codebook_size is 200, but the 90 item vectors have only 90"):
        tokenize(data, tmp_path / "ids", config(codebook_size=200), large=LargeCatalog(sizes=SIZES[0]))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_sentence_and_leaves_nothing(data, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_files.os, "pwrite", full)
    (tmp_path / "spill").mkdir()
    large = LargeCatalog(sizes=SIZES[0], spill=tmp_path / "spill")
    with pytest.raises(NoRoomError, match="its disk is full"):
        tokenize(data, tmp_path / "ids", config(), large=large)
    assert [path.name for path in tmp_path.rglob("*")] == ["spill"]


def test_vectors_that_one_process_has_to_make_are_refused(data, tmp_path):
    with pytest.raises(InputError, match="vectors from graph are made by one process"):
        tokenize(data, tmp_path, config(vectors="graph"))


def test_sequences_without_neighbors_are_refused(tmp_path):
    source = write_source(tmp_path / "source", [(f"u{user}", f"i{user % 3}", 5) for user in range(9)])
    prepare(source, tmp_path / "data", PrepareConfig(clean=True))
    with pytest.raises(InputError, match=r"no two different items near each other; .* use --vectors text"):
        tokenize(tmp_path / "data", tmp_path / "ids", config())


def test_other_ids_are_refused_before_anything_is_done(data, tmp_path):
    tokenize(data, tmp_path / "ids", config(), large=LargeCatalog(sizes=SIZES[0]))

    def never(task, shared, arguments):
        raise AssertionError

    with pytest.raises(InputError, match="has other semantic IDs of this data set already"):
        tokenize(data, tmp_path / "ids", config(seed=1), large=LargeCatalog(never))


def test_rows_of_items_are_read_across_row_groups(data):
    whole = Dataset.open(data).item_table["item_key"].to_pylist()
    found = item_rows(data / ITEMS_FILE, 15, 47, ["item_key", "text"])
    assert found["item_key"].to_pylist() == whole[15:47]


@pytest.mark.slow
@pytest.mark.ray
def test_tasks_on_ray_give_the_same_bits(ray_cluster, data, tmp_path):
    from rayrec.platform.ray_tasks import run_tasks_on_ray

    expected = tokenize(data, tmp_path / "one", config(), large=LargeCatalog(sizes=SIZES[0]))
    found = tokenize(data, tmp_path / "ray", config(), large=LargeCatalog(run_tasks_on_ray, sizes=SIZES[1]))

    assert found.report == expected.report

"""The published data sets of the quality page are read as they are described, where they are to be had."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks import quality_data, reproduction
from benchmarks.published_sets import divided_industrial
from benchmarks.quality_data import Row
from benchmarks.quality_rows import DATASETS, METHODS
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import real_data


def industrial(folder, rows):
    folder.mkdir()
    (folder / "sequences_recovered.tsv").write_text("user_id\titems\tperiods\n" + "".join(rows))
    items = {str(item): {"title": f"Item {item}", "brand": "Acme"} for item in range(6)}
    packed = gzip.compress(json.dumps(items).encode())
    (folder / "Industrial_and_Scientific.item.json.gz").write_bytes(packed)
    return folder


def test_industrial_is_divided_as_its_periods_say(tmp_path):
    source = industrial(tmp_path / "s", ["A0\t0 1 2 3\th h v t\n", "A1\t4 3 4 3 2\th h t t t\n"])
    written = tmp_path / "written"
    written.mkdir()

    divided_industrial(source, written)
    prepare(written, tmp_path / "data", PrepareConfig(clean=True))

    dataset = Dataset.open(tmp_path / "data")
    assert dataset.manifest.split.kind == "given"
    assert dataset.history_of("A0").tolist() == [0, 1, 2, 3]
    test = dataset.evaluation_rows("test")
    assert sorted(test.targets_B.tolist()) == [3, 4]
    assert dataset.evaluation_rows("valid").targets_B.tolist() == [2]
    assert dataset.manifest.counts["train_events"] == 4
    assert dataset.items.titles[dataset.position_by_key("5")].as_py() == "Item 5"


@pytest.mark.parametrize("row", ["A0\t0 1\th\n", "A0\t0 1\tt h\n", "A0\t0 1\th x\n"])
def test_periods_that_do_not_fit_are_refused(tmp_path, row):
    source = industrial(tmp_path / "s", ["A1\t0 1\th t\n", row])
    with pytest.raises(InputError, match="line 3: expected a period h, v or t of each item"):
        divided_industrial(source, tmp_path)


SIZES = {
    "yelp": (30_431, 20_033, 316_354, 30_431),
    "instruments": (24_772, 9_922, 206_153, 24_772),
    "industrial": (3_285, 3_686, 22_743, 1_987),
    "deskdrop-time": (1_895, 2_987, 72_312, None),
    "movielens-time": (943, 1_682, 100_000, None),
}
"""Users, items, events and users that are tested."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_published_set_has_the_published_size(name, tmp_path, monkeypatch):
    sources = real_data(DATASETS[name].source).parent
    monkeypatch.setattr(quality_data, "KEPT", tmp_path)

    dataset = Dataset.open(reproduction.prepared(Row(name, "shuffled", "sasrec"), sources))

    users, items, events, tested = SIZES[name]
    counts = dataset.manifest.counts
    assert (counts["users"], counts["items"], counts["events"] + counts["duplicates"]) == (
        users,
        items,
        events,
    )
    assert tested is None or dataset.num_evaluated("test") == tested
    assert dataset.num_evaluated("test") > 100
    has_text = dataset.items.texts.null_count < len(dataset.items)
    assert has_text == DATASETS[name].has_text
    if DATASETS[name].prepare.get("split") == "time":
        assert dataset.target_times("valid").max() < dataset.manifest.split.test_start
        assert dataset.target_times("test").min() >= dataset.manifest.split.test_start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "levels", "collisions"), [("beauty", 4, 13), ("instruments", 4, 25), ("industrial", 3, 16)]
)
def test_published_ids_are_imported_with_a_digit_for_collisions(
    name, levels, collisions, tmp_path, monkeypatch
):
    sources = real_data(DATASETS[name].source).parent
    monkeypatch.setattr(quality_data, "KEPT", tmp_path)
    row = Row(name, "shuffled", "generative-published")

    _, ids = quality_data.data_settings(row, METHODS["generative-published"], sources)

    registry = SemanticIdRegistry.load(ids.split("=")[1])
    codes_IL = registry.codes_IL
    assert (registry.num_codebooks, codes_IL.shape[1]) == (levels, levels + 1)
    assert len({tuple(row) for row in codes_IL[:, :levels].tolist()}) == len(codes_IL) - collisions
    assert len({tuple(row) for row in codes_IL.tolist()}) == len(codes_IL)

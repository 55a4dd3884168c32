"""Rows of versions in fewer bits: what services read of them, and what is refused."""

import json

import numpy as np
import pytest

from rayrec.embeddings.base.row_codec import decode, encode_rows
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.training.snapshot_writer import PublishedRun
from rayrec.pipelines.versions.gate import probe
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from tests.helpers.runs import SPARSE_SASREC, make_run

NARROW = ("bfloat16", "int8_row")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("run")
    settings = {"item_matrix": "sparse", "user_embedding": True}
    return RunFolder.open(make_run(folder, "sasrec", snapshots_after=(0, 1), **settings))


@pytest.fixture
def store(tmp_path) -> VersionStore:
    return VersionStore(str(tmp_path / "store"))


def published(run, store, rows, names=None):
    publisher = Publisher(run, store, rows=rows)
    return [publisher.publish(read_snapshot(run.snapshots / name)) for name in names or run.snapshot_names()]


def rows_of(model, ids_M):
    return model.tables.read({"item": ids_M})["item"]


@pytest.mark.parametrize("rows", NARROW)
def test_services_read_what_every_row_was_rounded_to(run, store, rows):
    versions = published(run, store, rows)

    held = None
    for name, version in zip(run.snapshot_names(), versions, strict=True):
        held = load_version(store, version, held=held)
        source = TrainedModel.load(run.path, name)
        ids_M = source.assembly.task.dataset.items.ids_I
        expected = decode(encode_rows(rows, rows_of(source, ids_M)))
        np.testing.assert_array_equal(rows_of(held.model, ids_M), expected)
    assert [segment.since is None for segment in versions[-1].segments] == [True, False, False]
    assert {segment.rows for segment in versions[-1].segments} == {rows}


@pytest.mark.parametrize("rows", ["float32", *NARROW])
def test_the_manifest_names_a_rounding_only_where_there_is_one(run, store, rows):
    """Services of earlier versions, which know no rounding, refuse a manifest with a key for it."""
    (version,) = published(run, store, rows, run.snapshot_names()[:1])

    (segment,) = json.loads(version.to_bytes())["segments"]

    assert segment.get("rows", "float32") == rows
    assert segment.keys() - {"rows"} == {"bundle", "step", "since", "snapshot"}
    assert ("rows" in segment) == (rows != "float32")
    assert store.version(1) == version


def test_answers_of_probes_are_those_that_services_give(run, store):
    (version,) = published(run, store, "int8_row", run.snapshot_names()[-1:])

    served = probe(Recommender(load_version(store, version).model), [each.user for each in version.probes])

    assert version.probes
    assert served.kept == version.probes


def test_another_format_publishes_all_rows_again(run, store):
    names = run.snapshot_names()
    (plain,) = published(run, store, "float32", names[:1])
    (narrow,) = published(run, store, "int8_row", names[1:2])

    assert narrow.segments[0].since is None
    assert {segment.rows for segment in narrow.segments} == {"int8_row"}
    assert not {each.bundle.name for each in narrow.segments} & {each.bundle.name for each in plain.segments}
    assert store.version(plain.number).segments[0].rows == "float32"


def test_a_run_publishes_rows_as_its_settings_say(run, store):
    config = run.config.model_dump(mode="json")
    config["snapshots"]["publish"] = {"to": store.url, "rows": "int8_row"}
    publish = RunConfig.parse(config).snapshots.publish

    PublishedRun(run, publish).update(run.snapshots / run.snapshot_names()[0])

    assert store.serving().segments[0].rows == "int8_row"


def test_a_model_without_tables_has_no_rows_to_round(tmp_path, store):
    dense = RunFolder.open(make_run(tmp_path / "dense", "sasrec"))

    with pytest.raises(InputError, match="cannot be published as int8_row: 'sasrec' has no tables here"):
        Publisher(dense, store, rows="int8_row")


@pytest.mark.parametrize(
    ("rows", "weight_dtype", "is_refused"),
    [("int8_row", "bfloat16", True), ("bfloat16", "bfloat16", False), ("int8_row", "float32", False)],
)
def test_rows_that_are_kept_in_16_bits_are_not_rounded_twice(rows, weight_dtype, is_refused):
    config = {
        "data": {"path": "data"},
        "model": {"name": "sasrec", **SPARSE_SASREC},
        "sparse": {"weight_dtype": weight_dtype},
        "snapshots": {"publish": {"to": "versions", "rows": rows}},
    }
    if is_refused:
        with pytest.raises(InputError, match=r"snapshots\.publish\.rows is 'int8_row': table 'item' keeps"):
            RunConfig.parse(config)
    else:
        RunConfig.parse(config)

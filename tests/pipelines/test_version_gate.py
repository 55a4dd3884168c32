"""A model that is broken is not published, and one that was published all the same does not answer."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from rayrec.embeddings.table.table_rows import TableRows
from rayrec.pipelines.config.sections import PublishConfig
from rayrec.pipelines.inference.answers import Answer, Recommendation
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import WEIGHTS, Snapshot, read_snapshot
from rayrec.pipelines.training.snapshot_writer import PublishedRun
from rayrec.pipelines.versions import publisher as publisher_module
from rayrec.pipelines.versions.gate import (
    GateError,
    Probed,
    check_answers,
    check_catalog,
    check_weights,
    finite_rows,
    overlap,
)
from rayrec.pipelines.versions.manifest import ModelVersion, Probe
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.samples.dataset.manifest import ITEMS_FILE
from tests.helpers.runs import make_run


@pytest.fixture(scope="module", params=["sasrec", "prefix"])
def run(request, tmp_path_factory) -> RunFolder:
    return RunFolder.open(make_run(tmp_path_factory.mktemp("run"), request.param, snapshots_after=(0,)))


def changed(run: RunFolder, value: float | None, folder: Path) -> Snapshot:
    """The best snapshot with one number for all dense weights; None: with random ones."""
    best = run.chosen_snapshot("best")
    copy = folder / "snapshots" / best.name
    shutil.copytree(best.parent, copy.parent)  # it builds on others
    weights = load_file(copy / WEIGHTS)
    random = np.random.default_rng(1)
    for values in weights.values():
        values[...] = random.normal(size=values.shape) if value is None else value
    save_file(weights, copy / WEIGHTS)
    return read_snapshot(copy, checksums=False)


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "not finite"), (0.0, "different histories all get the same items")]
)
def test_broken_weights_are_not_published_and_the_version_before_serves(run, tmp_path, value, message):
    store = VersionStore(tmp_path / "store")
    publisher = Publisher(run, store)
    publisher.publish(read_snapshot(run.chosen_snapshot("best")))

    with pytest.raises(GateError, match=message):
        publisher.publish(changed(run, value, tmp_path))

    assert store.numbers() == [1]
    assert store.serving().number == 1


def test_answers_to_users_of_the_data_are_kept_with_a_version_and_compared(run, tmp_path):
    store = VersionStore(tmp_path)
    publisher = Publisher(run, store)
    names = run.snapshot_names()
    first, again, other = (publisher.publish(read_snapshot(run.snapshots / names[at])) for at in (0, 0, -1))

    assert len(first.probes) == 32
    assert all(len(each.items) == 10 for each in first.probes)
    assert (first.overlap, again.overlap) == (None, 1.0)
    assert other.overlap == overlap(other.probes, first.probes)
    assert ModelVersion.from_bytes(other.to_bytes(), "here") == other


def test_a_version_that_answers_unlike_the_one_before_is_held_back_where_that_is_wanted(run, tmp_path):
    store = VersionStore(tmp_path)
    Publisher(run, store).publish(read_snapshot(run.chosen_snapshot("best")))
    other = changed(run, None, tmp_path / "copy")

    with pytest.raises(GateError, match="min_overlap wants 90%"):
        Publisher(run, store, min_overlap=0.9).publish(other)
    assert Publisher(run, store).publish(other).number == 2


def test_a_model_that_is_too_large_to_be_loaded_is_published_without_answers(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publisher_module, "MOST_PROBED_BYTES", 10)

    version = Publisher(run, VersionStore(tmp_path)).publish(read_snapshot(run.chosen_snapshot("best")))

    assert version.probes == ()


def test_a_run_that_trains_counts_what_is_held_back(run, tmp_path, caplog):
    published = PublishedRun(run, PublishConfig(to=str(tmp_path / "store")))
    published.update(run.chosen_snapshot("best"))

    published.update(changed(run, np.inf, tmp_path).path)

    assert run.state["failed_publications"] == 1
    assert "not finite" in caplog.text


def test_weights_that_are_no_numbers_are_named():
    with pytest.raises(GateError, match=r"here: the dense weights 'head' have 1 of 4 values"):
        check_weights({"count": np.arange(3), "head": np.array([1.0, 2, np.inf, 3], np.float16)}, "here")


def test_rows_that_are_no_numbers_are_found_on_their_way():
    def rows(weights):
        ids = np.arange(len(weights))
        state = np.zeros((len(ids), 0), np.float32)
        steps = np.zeros(len(ids), np.int32)
        return TableRows(ids, np.array(weights, np.float32), state, steps, steps)

    good = rows([[1.0, 2.0]])
    parts = finite_rows([good, rows([[1.0, np.nan], [0.0, 0.0]])], "there")

    assert next(parts) is good
    with pytest.raises(GateError, match="there: the rows have 1 of 4"):
        next(parts)


def probed(*lists: list[tuple[str, float]]) -> Probed:
    answers = [Answer([Recommendation(key, None, score) for key, score in each], 2, 0) for each in lists]
    users = tuple(f"u{at}" for at in range(len(lists)))
    return Probed(users, tuple((at,) for at in range(len(lists))), tuple(answers))


def test_answers_are_sane_if_most_have_items_and_users_are_told_apart():
    check_answers(probed([("a", 1.0)], [("a", 0.9)], []), "here")
    check_answers(probed([("a", 1.0)]), "here")
    check_answers(probed(), "here")
    with pytest.raises(GateError, match="1 of 2 users of its data get no item"):
        check_answers(probed([("a", 1.0)], []), "here")
    with pytest.raises(GateError, match="'u1' are not finite"):
        check_answers(probed([("a", 1.0)], [("b", np.nan)]), "here")


def test_overlap_is_over_users_that_both_know():
    mine = [Probe(user="a", items=("x", "y")), Probe(user="b", items=("x",)), Probe(user="c", items=("z",))]
    others = [Probe(user="a", items=("y", "z")), Probe(user="b", items=("x",))]

    assert overlap(mine, others) == 0.75
    assert overlap(mine, []) is None


@pytest.mark.parametrize(
    ("keys", "titles", "is_other"),
    [
        (range(10), [f"Film {key}" for key in range(10)], False),
        (range(5, 300), [f"Film {key}" for key in range(5, 300)], False),  # a year later
        (range(3), [None] * 3, False),
        (range(10), [f"Book {key}" for key in range(10)], True),  # ids that are numbers
        (range(50, 60), [f"Film {key}" for key in range(50, 60)], True),
    ],
)
def test_a_catalog_of_something_else_is_told_from_a_later_one(tmp_path, keys, titles, is_other):
    def folder(name, keys, titles):
        (tmp_path / name).mkdir()
        columns = {"item_key": pa.array(map(str, keys)), "title": pa.array(titles, pa.string())}
        pq.write_table(pa.table(columns), tmp_path / name / ITEMS_FILE)
        return tmp_path / name

    before = folder("before", range(10), [f"Film {key}" for key in range(10)])
    now = folder("now", keys, titles)

    if not is_other:
        check_catalog(now, before, "here")
        return
    with pytest.raises(GateError, match=r"here: its catalog has 0%.*--other-catalog"):
        check_catalog(now, before, "here")


def test_a_run_of_another_catalog_is_refused_by_the_store_unless_it_is_meant(run, tmp_path, monkeypatch):
    def other_items(catalog, before, where):
        raise GateError(f"{where}: other")

    store = VersionStore(tmp_path / "store")
    Publisher(run, store).publish(read_snapshot(run.chosen_snapshot("best")))
    other = RunFolder.open(make_run(tmp_path / "other", labeled=True))
    monkeypatch.setattr(publisher_module, "check_catalog", other_items)
    snapshot = read_snapshot(other.chosen_snapshot("best"))

    with pytest.raises(GateError, match="other"):
        Publisher(other, store).publish(snapshot)
    assert Publisher(other, store, other_catalog=True).publish(snapshot).number == 2

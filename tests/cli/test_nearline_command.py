"""`rayrec nearline`: from a run, or published versions, to products that a service reads."""

import json

import pytest

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.pipelines.nearline.product_store import ProductStore
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.samples.stores import StoreManifest, open_store, open_values
from rayrec.serve.launch import nearline
from rayrec.serve.launch.nearline import NearlineJob, NearlineLoop
from tests.cli.commands import answer, refused
from tests.helpers.runs import NUM_USERS, make_run


def test_all_users_once_and_nothing_the_second_time(tmp_path):
    run, store = make_run(tmp_path), tmp_path / "products"

    first = answer("nearline", run, "--store", store, "--once", "--single-process")
    assert (first["computed"], first["valid"]) == (NUM_USERS, 0)
    products = ProductStore(open_values(store))
    assert products.coverage(Recommender.load(run).identity) == 1.0
    products.close()
    again = answer("nearline", run, "--store", store, "--once", "--single-process")
    assert again["computed"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--single-process"], "no event store is named"),
        (["--products", "neighbors", "--once", "--single-process"], "no graph is named"),
        (["--products", "summaries", "--once", "--single-process"], "reads no summaries"),
        (["--products", "", "--once"], "name at least one kind"),
    ],
)
def test_what_cannot_be_computed_is_told(tmp_path, options, message):
    run = make_run(tmp_path)
    assert message in refused("nearline", run, "--store", tmp_path / "products", *options)


def test_users_whose_events_have_no_times_are_not_left_out_as_inactive(tmp_path):
    run = make_run(tmp_path)
    manifest = tmp_path / "data" / "dataset.json"
    known = json.loads(manifest.read_text())
    known["counts"]["ordered_without_times"] = 9
    manifest.write_text(json.dumps(known))
    command = ("nearline", run, "--store", tmp_path / "products", "--once", "--single-process")

    assert "--active-days: " in (message := refused(*command, "--active-days", "7"))
    assert "does not say when events were" in message
    assert answer(*command)["computed"] == NUM_USERS


def test_workers_of_ray_are_not_started_for_events_that_nobody_tells_of(tmp_path, monkeypatch):
    monkeypatch.setattr(nearline, "_on_ray", lambda *arguments: pytest.fail("workers were started"))
    run = make_run(tmp_path)
    assert "no event store is named" in refused("nearline", run, "--store", tmp_path / "products")
    history = tmp_path / "events"
    open_store(history, create=StoreManifest(time_unit="s")).close()
    message = refused("nearline", run, "--store", tmp_path / "products", "--events", history)
    assert "has one side, so nothing says which events came" in message


def test_a_new_version_gets_its_products_while_the_one_before_is_kept(tmp_path):
    run = RunFolder.open(make_run(tmp_path, snapshots_after=(0,)))
    versions = VersionStore(tmp_path / "versions")
    names = run.snapshot_names()
    Publisher(run, versions).publish(read_snapshot(run.snapshots / names[0]))
    now = [0.0]
    job = NearlineJob(
        str(tmp_path / "versions"), str(tmp_path / "products"), None, NearlineConfig(batch_users=16)
    )
    loop = NearlineLoop(job, clock=lambda: now[0])
    while loop.step():
        pass
    assert loop.report().computed == NUM_USERS
    first = loop.worker
    Publisher(run, versions).publish(read_snapshot(run.snapshots / names[1]))
    assert loop.step() == 0  # it looks every few seconds
    now[0] = 10.0
    assert loop.step() == 16
    assert loop.worker is not first
    # The version that answers is kept up to date meanwhile.
    seen, step = [], first.step
    first.step = lambda: seen.append(loop.worker.is_complete) or step()
    while loop.step():
        pass
    assert loop.report().computed == 2 * NUM_USERS
    assert seen
    assert not any(seen)
    loop.close()

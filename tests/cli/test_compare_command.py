"""`compare`, and what `evaluate` leaves for it, on tiny runs."""

import json
import shutil

import pytest

from rayrec.pipelines.evaluation.lists import MODEL, SWING, neighbor_positions_path, positions_path
from rayrec.pipelines.metrics.positions import Positions, read_header
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.cli.commands import answer, rayrec, refused
from tests.helpers.data import random_events, small_dataset, write_source
from tests.helpers.runs import NUM_ITEMS, NUM_USERS, make_run, trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two models on the same data set, made twice."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: make_run(folder / name, name) for name in ("sasrec", "prefix")}


def positions_of(run):
    return positions_path(run, "test", "step-000000003")


def test_runs_are_evaluated_where_they_were_not_and_compared(runs):
    sasrec, prefix = runs.values()

    found = answer("compare", sasrec, prefix, "--slices")

    (of_a,), (of_b,) = found["a_runs"], found["b_runs"]
    assert (of_a["search"], of_b["search"]) == ("every item is scored", "64 beams")
    whole = found["results"]["all users"]
    assert whole["num_users"] == read_header(positions_of(sasrec)).num_users
    assert whole["difference"]["value"] == pytest.approx(whole["b"]["value"] - whole["a"]["value"])
    assert {"head items", "tail items"} <= set(found["results"])
    assert not (sasrec / "evaluation-test.json").exists()  # which would lack the baselines

    before = positions_of(sasrec).stat().st_mtime_ns
    assert answer("compare", sasrec, prefix, "--slices") == found
    assert positions_of(sasrec).stat().st_mtime_ns == before


def test_what_evaluate_writes_is_what_is_compared(runs):
    sasrec, prefix = runs.values()
    report = answer("evaluate", prefix)
    answer("compare", sasrec, prefix)

    found = answer("compare", prefix, prefix / "evaluation-test.json", "--metric", "ndcg@10")

    whole = found["results"]["all users"]
    assert whole["a"]["value"] == whole["b"]["value"]
    assert whole["a"]["value"] == pytest.approx(report["results"][MODEL]["ndcg@10"]["value"])
    assert report["positions"] == positions_of(prefix).name
    assert json.loads((prefix / "evaluation-test.json").read_text()) == report
    assert report["lists"][MODEL]["not_available"] == []  # 64 beams find all of 30 items
    assert 0 < report["lists"][MODEL]["coverage@10"] <= 1


def test_another_snapshot_of_the_same_step_is_evaluated_anew(runs):
    sasrec, prefix = runs.values()
    right = answer("compare", sasrec, prefix)
    positions = Positions.read(positions_of(sasrec))
    header = positions.header.model_copy(update={"snapshot_fingerprint": "of another one"})
    missed = {name: places_U * 0 for name, places_U in positions.places.items()}
    Positions(header, missed, positions.users).write(positions_of(sasrec))

    assert answer("compare", sasrec, prefix) == right
    assert read_header(positions_of(sasrec)) == positions.header


def test_neighbors_are_compared_with_runs_and_other_data_are_refused(runs, tmp_path):
    sasrec, _ = runs.values()
    data = sasrec.parent / "data"
    assert f"run rayrec evaluate --neighbors {data}" in refused("compare", sasrec, data)
    report = answer("evaluate", "--neighbors", data)
    assert report["positions"] == str(neighbor_positions_path(data, "test"))

    found = answer("compare", sasrec, data, "--list-b", SWING)

    assert found["results"]["all users"]["b"]["value"] == report["results"][SWING]["recall@10"]["value"]
    _, printed, _ = rayrec("compare", sasrec, data)
    assert f"B: {data}, not trained," in " ".join(printed.split())
    other = small_dataset(tmp_path, num_users=20).root
    answer("evaluate", "--neighbors", other)
    assert "are of different users" in refused("compare", sasrec, other)


def test_runs_of_two_days_are_compared_on_the_events_of_a_third(tmp_path):
    """Each ranks the catalog that it was trained on."""
    monday = make_run(tmp_path / "monday")
    events = random_events(NUM_USERS, NUM_ITEMS)
    keys = [f"i{item}" for item in range(NUM_ITEMS + 2)]
    items = {"item_id": keys, "title": [f"Title of {key}" for key in keys]}
    new = ["i0", "i1", *keys[NUM_ITEMS:]]
    days = []
    for day, name in enumerate(("tuesday", "wednesday")):
        events = events + [(f"v{day}{user}", key, 2000 + day) for user in range(9) for key in new]
        data = tmp_path / name / "data"
        prepare(write_source(tmp_path / name / "source", events, items), data, PrepareConfig())
        days.append(data)
    config = RunFolder.open(monday).config
    tuesday = trained(config.with_data(days[0]), tmp_path / "tuesday" / "run")

    assert "are of different users" in refused("compare", monday, tuesday)
    found = answer("compare", monday, tuesday, "--on", days[1])

    dataset = Dataset.open(days[1])
    whole, report = found["results"]["all users"], answer("evaluate", tuesday, "--on", days[1], "--slices")
    # What Tuesday's run knows is no news.
    assert (whole["num_users"], found["num_left_out"]) == (9, Dataset.open(days[1]).num_evaluated("test") - 9)
    assert whole["b"]["value"] == report["results"][MODEL]["recall@10"]["value"]
    of_monday = Positions.read(positions_path(monday, "test", "step-000000003", on=dataset.fingerprint))
    wednesday = {dataset.user_by_key(f"v1{user}") for user in range(9)}
    hits = [
        place < 10
        for user, place in zip(
            of_monday.users.user_ids_U.tolist(), of_monday.places[MODEL].tolist(), strict=True
        )
        if user in wednesday
    ]
    assert (len(hits), len(of_monday.users)) == (9, 18)
    assert whole["a"]["value"] == pytest.approx(sum(hits) / 9)
    code, printed, _ = rayrec("compare", monday, tuesday, "--on", days[1], "--slices")
    assert (code, "49 users are left out" in printed) == (0, True)
    assert "bythetrainingdataof" + "".join(str(tuesday).split()) in "".join(printed.split())
    answer("evaluate", "--neighbors", days[0])
    answer("evaluate", tuesday)
    assert f"name {days[1]}" in refused("compare", monday, days[0], "--on", days[1])
    elsewhere = refused("compare", monday, tuesday / "evaluation-test.json", "--on", days[1])
    assert "is of events of source, not of" in elsewhere
    neighbors = answer("evaluate", "--neighbors", days[1])
    found = answer("compare", tuesday, days[1], "--on", days[1])
    assert found["results"]["all users"]["num_users"] == 9 < neighbors["num_users"]
    path = positions_path(tuesday, "test", "step-000000004", on=dataset.fingerprint)
    assert report["positions"] == path.name
    assert read_header(path).num_items == NUM_ITEMS + 2
    shown = "".join(rayrec("evaluate", monday, "--on", days[1])[1].split())
    assert f"testsplitof{days[1]}" in shown
    for more in (["--candidates-with-neighbors", 10], ["--ranker", tuesday]):
        assert "--on" in refused("evaluate", monday, "--on", days[1], *more)
    assert f"--neighbors {days[1]}" in refused("evaluate", "--neighbors", days[0], "--on", days[1])


def test_a_name_that_looks_like_a_pattern_is_a_name(runs, tmp_path):
    sasrec, _ = runs.values()
    named = tmp_path / "a[b]"
    shutil.copytree(sasrec, named)

    code, printed, _ = rayrec("compare", named, sasrec)

    assert code == 0
    assert f"A: {named}, 1 seed" in " ".join(printed.split()).replace(" a[b]", "a[b]")


def test_seeds_are_several_runs_of_a_side(runs, tmp_path):
    sasrec, prefix = runs.values()

    both = f"{sasrec},{prefix}"
    assert "differ in more than the seed" in refused("compare", both, sasrec.parent.parent / "p*" / "run")
    assert "would count twice" in refused("compare", f"{sasrec},{sasrec}", prefix)
    positions = Positions.read(positions_of(sasrec))
    assert positions.header.seed == 0
    other = positions.header.model_copy(update={"seed": 1, "snapshot_fingerprint": "of the other seed"})
    seed = tmp_path / "other.parquet"
    Positions(other, positions.places, positions.users).write(seed)

    code, printed, _ = rayrec("compare", f"{sasrec},{seed}", sasrec.parent.parent / "p*" / "run")

    assert code == 0
    said = " ".join(printed.split())
    assert "2 seeds (" in said
    assert "other.parquet" in "".join(printed.split())
    assert "over users and seeds of A, not of B, which has one" in said


def test_lists_of_a_few_items_say_which_metrics_they_have_not(runs):
    sasrec, _ = runs.values()

    code, printed, _ = rayrec("evaluate", sasrec, "--depth", 10, "--no-baselines", "--slices")
    assert code == 0
    assert "head items: the target is one of" in printed

    report = json.loads((sasrec / "evaluation-test.json").read_text())
    assert {"recall@50", "recall@500", "mrr@50"} <= set(report["lists"][MODEL]["not_available"])
    assert "recall@50" not in report["results"][MODEL]
    assert "too few for recall@50" in refused("compare", sasrec, sasrec, "--metric", "recall@50")
    assert "there is no metric 'auc'" in refused("compare", sasrec, sasrec, "--metric", "auc")
    assert f"{sasrec}x: no such run, data set or file" in refused("compare", sasrec, f"{sasrec}x")
    answer("evaluate", sasrec, "--no-baselines")

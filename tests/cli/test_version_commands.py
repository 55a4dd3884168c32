"""Publishing, listing and going back, as they are typed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.pipelines.versions.store import VersionStore
from tests.helpers.later_data import run_of_words
from tests.helpers.runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), snapshots_after=(0,), item_matrix="sparse")


def answer(*arguments: object) -> dict:
    found = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.splitlines()[-1])


def published(*arguments: object) -> dict[str, object]:
    found = answer("publish", *arguments)
    assert found.pop("row_bytes") > 0
    return found


def refused(*arguments: object) -> str:
    found = CliRunner().invoke(app, [*map(str, arguments)])
    assert found.exit_code == 2, found.output
    return " ".join(found.output.split())


def test_a_store_is_filled_listed_and_gone_back_in(run, tmp_path):
    store = tmp_path / "store"
    assert "nothing was published here" in refused("versions", store)
    assert published(run, store, "--snapshot", "previous") == {"version": 1, "serving": 1}
    assert "there is none before it" in refused("rollback", store)
    assert published(run, store) == {"version": 2, "serving": 2}
    assert answer("rollback", store) == {"serving": 1, "before": 2, "is_held": True}
    assert published(run, store, "--keep", 2) == {"version": 3, "serving": 1}
    listed = answer("versions", store)
    assert (listed["serving"], listed["is_held"]) == (1, True)
    assert [each["version"] for each in listed["versions"]] == [1, 2, 3]
    assert answer("rollback", store, "--undo") == {"serving": 3, "before": 1, "is_held": False}
    assert answer("rollback", store, "--to", 2)["serving"] == 2
    assert "has no version 7; it has 1 to 3" in refused("rollback", store, "--to", 7)
    assert "give one of them" in refused("rollback", store, "--to", 1, "--undo")
    assert "not a run folder" in refused("publish", store, tmp_path / "other")


def test_a_folder_of_something_else_is_no_store(run):
    data = run.parent / "data"
    before = sorted(data.iterdir())

    assert "and no versions; give the store a place of its own" in refused("publish", run, data)

    assert sorted(data.iterdir()) == before


def test_a_later_catalog_is_published_for_a_run_and_stays_until_its_own_is_wanted(tmp_path):
    run, later = run_of_words(tmp_path, snapshots_after=(0,))
    store = tmp_path / "store"
    assert "nowhere" in refused("publish", run, store, "--data", tmp_path / "nowhere")
    for further in (
        ("--snapshot", "previous"),
        ("--data", later.root),
        (),
        ("--snapshot", "previous", "--data", tmp_path / "data"),
    ):
        answer("publish", run, store, *further)

    versions = [VersionStore(store).version(number) for number in (1, 2, 3, 4)]
    assert [version.earlier is not None for version in versions] == [False, True, True, False]
    assert [each["items"] for each in answer("versions", store)["versions"]] == [30, 34, 34, 30]
    # A catalog leaves the weights that serve.
    assert [version.step for version in versions] == [0, 0, 2, 0]

"""`rayrec prepare`: what can be said on the command line, and errors that name what can be typed."""

import contextlib
import json

import pytest
from typer.testing import CliRunner

from rayrec.cli import app, data
from rayrec.platform import ray_tasks
from rayrec.platform.tasks import run_tasks_locally
from tests.helpers.data import write_source

DAY = 86_400
EVENTS = [(user, item, 1_577_836_800 + item * DAY) for user in ("a", "b") for item in range(10)]


def rayrec(*arguments):
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments), "--no-ray", "--json"])
    return result.exit_code, result.stdout, result.stderr


def prepared(*arguments):
    code, stdout, stderr = rayrec(*arguments)
    assert code == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def refused(*arguments):
    code, _, stderr = rayrec(*arguments)
    assert code == 2
    return stderr.splitlines()[-1]


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source", EVENTS)


def test_a_finished_data_set_is_not_prepared_again_and_the_command_succeeds(
    source, tmp_path, monkeypatch, caplog
):
    out = tmp_path / "data"
    monkeypatch.setattr(data, "preparing_cluster", contextlib.nullcontext)
    monkeypatch.setattr(ray_tasks, "run_tasks_on_ray", run_tasks_locally)
    first, again = (
        CliRunner().invoke(app, ["prepare", str(source), str(out), option, "--json"])
        for option in ("--ray", "--resume")
    )
    assert (first.exit_code, again.exit_code) == (0, 0), again.stderr
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    assert f"{out}: is finished already" in caplog.text

    other = CliRunner().invoke(app, ["prepare", str(source), str(out), "--resume", "--seed", "1"])
    assert other.exit_code == 2
    assert "seed is 1, but the data set was made with 0" in other.stderr


def test_a_split_by_time_takes_dates(source, tmp_path):
    dates = ["--valid-start", "2020-01-06", "--test-start", "2020-01-08T00:00:00Z"]
    answer = prepared(source, tmp_path / "data", "--split", "time", "--targets", "random", *dates)
    boundaries = {"valid_start": 1_578_268_800, "test_start": 1_578_441_600}
    assert answer["split"] == {"kind": "time", "targets": "random", **boundaries}
    assert answer["counts"]["train_events"] == 10


def test_a_split_by_time_takes_fractions(source, tmp_path):
    fractions = ["--valid-fraction", 0.2, "--test-fraction", 0.3]
    answer = prepared(source, tmp_path / "data", "--split", "time", *fractions)
    assert answer["counts"]["train_events"] == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--valid-start", "2020-01-06"], "--split time"),
        (["--targets", "last"], "targets (--targets) belongs to the split by time"),
        (["--split", "time", "--valid-start", "2020-01-06"], "test_start (--test-start) go together"),
        (
            ["--split", "time", "--valid-start", "6.1.2020"],
            "valid_start (--valid-start) is '6.1.2020'; expected",
        ),
        (["--text-column", "plot"], "text_columns (--text-column) names 'plot'"),
        (["--column", "user_id=a", "--column", "user_id=b"], "--column user_id=b: user_id is named twice"),
        (["--layout-setting", "a=1", "--layout-setting", "a=2"], "--layout-setting a=2: a is named twice"),
    ],
)
def test_refusals_name_the_options(source, tmp_path, options, message):
    assert message in refused(source, tmp_path / "data", *options)


def test_a_taken_folder_names_the_option(source, tmp_path):
    prepared(source, tmp_path / "data")
    assert "overwrite (--overwrite)" in refused(source, tmp_path / "data")
    prepared(source, tmp_path / "data", "--overwrite")


def test_what_may_be_allowed_is_named_as_it_is_typed(tmp_path):
    source = write_source(tmp_path / "source", [*EVENTS, ("c", 1, 5), EVENTS[0]])
    line = refused(source, tmp_path / "data")
    assert "allow duplicates (--allow duplicates)" in line
    assert "allow short-users (--allow short-users)" in line
    prepared(source, tmp_path / "data", "--allow", "duplicates", "--allow", "short-users")


def test_columns_of_items_become_text_by_option(tmp_path):
    items = {"item_id": list(range(10)), "title": ["T"] * 10, "plot2": ["p"] * 10, "sku": ["S"] * 10}
    source = write_source(tmp_path / "source", EVENTS, items=items)
    assert prepared(source, tmp_path / "data", "--text-column", "plot2")["text_columns"] == ["title", "plot2"]

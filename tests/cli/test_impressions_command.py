"""`rayrec impressions`: what can be said on the command line."""

import json

import pytest
from typer.testing import CliRunner

from rayrec.cli import app


def rayrec(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, result.stdout, result.stderr


def answer(*arguments):
    code, stdout, stderr = rayrec(*arguments)
    assert code == 0, stderr
    return stdout, json.loads(stdout.splitlines()[-1])


def refused(*arguments):
    code, _, stderr = rayrec(*arguments)
    assert code == 2
    return stderr.splitlines()[-1]


@pytest.fixture
def table(tmp_path):
    lines = [
        "click,price,user,item,history",
        *(f"{n % 2},{n},u{n % 3},i{n},i{n - 1}|i{n - 2}" for n in range(20)),
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    return tmp_path / "log.csv"


ROLES = [
    *("--layout", "table", "--label", "click", "--number", "price", "--id", "user", "--id", "item"),
    *("--list", "history:item", "--group", "user"),
]


def test_columns_are_named_by_their_parts(table, tmp_path):
    stdout, found = answer("impressions", table, tmp_path / "data", *ROLES)
    assert found["columns"] == {
        "labels": ["click"],
        "numbers": ["price"],
        "ids": {"user": "user", "item": "item"},
        "lists": {"history": "item"},
        "group": "user",
    }
    assert found["rows"] == {"train": 16, "valid": 2, "test": 2}
    assert "8 (50.00%) / 1 (50.00%) / 1 (50.00%)" in stdout
    assert "ids of item" in stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--id", "user"], "--id user: the column user is named twice"),
        (["--list", "history:"], "--list history:: expected COLUMN or COLUMN:SPACE"),
        (["--split", "files"], "choose order, time or random with split (--split)"),
        (["--split", "time"], "no column is the time; name it (time (--time))"),
        (["--valid-start", "2020-01-01"], "--split time"),
        (["--label", "sold"], "log.csv: no column sold; found click, price"),
    ],
)
def test_refusals_name_the_options(table, tmp_path, options, message):
    assert message in refused("impressions", table, tmp_path / "data", *ROLES, *options)
    assert not (tmp_path / "data").exists()


def test_a_missing_source_is_named(tmp_path):
    assert "no such file or folder" in refused(
        "impressions", tmp_path / "none", tmp_path / "data", "--layout", "criteo"
    )


def test_the_command_that_moved_says_where(tmp_path):
    arguments = ["synthetic-impressions", str(tmp_path / "data"), "--rows", "1000"]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2
    assert "python -m benchmarks.synthetic_impressions" in " ".join(result.stderr.split())

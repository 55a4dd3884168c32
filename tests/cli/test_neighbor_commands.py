"""`evaluate` and `recommend` without a run."""

import pytest

from tests.cli.commands import answer, refused
from tests.helpers.data import small_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("data")).root


def test_a_data_set_is_judged_without_a_model(data):
    results = answer("evaluate", "--neighbors", data)["results"]

    assert set(results) > {"neighbors, co-visitation", "neighbors, Swing", "popularity"}


def test_users_get_neighbors_of_what_they_did(data):
    items = answer("recommend", "--neighbors", data, "--user", "u3", "-k", 4, "--deny", "i0")["items"]

    assert len(items) == 4
    assert "i0" not in {item["item_key"] for item in items}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate"], "give the folder of a run, or --neighbors"),
        (["evaluate", "runs/none", "--neighbors", "DATA"], "and not both"),
        (["recommend", "--user", "u1"], "give the folder of a run, or --neighbors"),
        (["recommend", "--user", "nobody", "--neighbors", "DATA"], "there is no such user"),
        (["recommend", "--user", "u1", "--neighbors", "DATA", "--scenario", "home"], "takes no ranker"),
        (["recommend", "--user", "u1", "--neighbors", "DATA", "--deny", "0i0"], "there is no such item"),
    ],
)
def test_what_makes_no_sense_is_said(data, arguments, message):
    assert message in refused(*(data if each == "DATA" else each for each in arguments))

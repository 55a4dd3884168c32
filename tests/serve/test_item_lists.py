"""Requests say what may be shown, by ids or by lists that the service keeps."""

import json
from contextlib import contextmanager

import pytest
from fastapi.testclient import TestClient

from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine import lists
from rayrec.serve.engine.lists import LOOK_EVERY_S, MOST_MISSING, ItemLists
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.runs import make_run


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("run"), "prefix")
    with TestClient(load_api(run, ServeConfig(page=False), PrometheusMeter())) as client:
        yield client


def recommended(client, **wanted):
    answer = client.post("/v1/recommend", json={"user_id": "u1", "k": 5, "exclude_seen": False, **wanted})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_list_is_kept_used_replaced_and_forgotten(client):
    first = client.put("/v1/lists/stock", json={"items": ["i1", "i2", "i2", "gone"]}).json()
    assert (first["name"], first["num_items"]) == ("stock", 3)
    answer = recommended(client, filter={"allow_lists": ["stock"]})
    assert {item["item_id"] for item in answer["items"]} == {"i1", "i2"}
    assert (answer["source"], answer["allowed_items"]) == ("model", 2)
    assert answer["unknown_filter_items"] == 1

    second = client.put("/v1/lists/stock", json={"items": ["i3"]}).json()
    assert second["version"] != first["version"]
    answer = recommended(client, filter={"allow_lists": ["stock"]})
    assert [item["item_id"] for item in answer["items"]] == ["i3"]
    denied = recommended(client, k=30, filter={"deny_lists": ["stock"]})
    assert len(denied["items"]) == denied["allowed_items"] == 29

    assert client.get("/v1/lists").json() == {"lists": ["stock"]}
    assert client.get("/v1/lists/stock").json() == {"items": ["i3"]}
    assert client.delete("/v1/lists/stock").status_code == 200
    assert client.delete("/v1/lists/stock").status_code == 404
    refused = client.post("/v1/recommend", json={"user_id": "u1", "filter": {"allow_lists": ["stock"]}})
    assert refused.status_code == 422
    assert "there is no list 'stock'" in refused.json()["error"]


def test_ids_and_columns_filter_with_and_without_a_history(client):
    assert recommended(client, filter={"allow": ["i4"]})["items"][0]["item_id"] == "i4"
    assert recommended(client, filter={"where": {"title": ["Title of i5"]}})["items"][0]["item_id"] == "i5"
    popular = recommended(client, user_id=None, filter={"allow": ["i4", "i5"]})
    assert popular["source"] == "popular"
    assert {item["item_id"] for item in popular["items"]} == {"i4", "i5"}
    nothing = recommended(client, filter={"allow": []})
    assert (nothing["items"], nothing["allowed_items"]) == ([], 0)
    foreign = recommended(client, filter={"allow": [4, 5], "deny": ["?"]})
    assert (foreign["items"], foreign["allowed_items"], foreign["unknown_filter_items"]) == ([], 0, 3)
    gone = recommended(client, filter={"where": {"title": ["nothing", "Title of i5"]}})
    assert (gone["allowed_items"], gone["unknown_filter_items"]) == (1, 1)
    assert recommended(client)["allowed_items"] is None


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"where": {"colour": "red"}}, "no column 'colour'"),
        ({"only": []}, "filter.only: unknown field"),
        ({"allow": "i1"}, "filter.allow"),
    ],
)
def test_filters_that_cannot_be_followed_are_refused(client, wanted, sentence):
    answer = client.post("/v1/recommend", json={"user_id": "u1", "filter": wanted})

    assert answer.status_code == 422
    assert sentence in answer.json()["error"]


def test_other_protocols_filter_too(client):
    wanted = {"allow": ["i7", "i8", "?"]}
    body = {"model": "recommend", "prompt": "i1 i2", "n": 5, "filter": wanted}
    completion = client.post("/v1/completions", json=body).json()
    choices = completion["choices"]
    assert (completion["allowed_items"], completion["unknown_filter_items"]) == (2, 1)
    assert {choice["item_id"] for choice in choices} == {"i7", "i8"}
    tensors = {
        "parameters": {"k": 3, "filter": json.dumps(wanted)},
        "inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["u1"]}],
        "outputs": [{"name": "num_items"}],
    }
    answer = client.post("/v2/models/recommend/infer", json=tensors)
    assert answer.json()["outputs"][0]["data"] == [2]
    assert answer.json()["parameters"] == {"allowed_items": 2, "unknown_filter_items": 1}
    tensors["parameters"]["filter"] = "{"
    assert "parameters: filter" in client.post("/v2/models/recommend/infer", json=tensors).json()["error"]


def test_a_filter_that_leaves_nothing_gives_completions_without_choices(client):
    body = {"model": "recommend", "prompt": ["i1 i2", "i3"], "n": 2}
    answer = client.post("/v1/completions", json=body | {"filter": {"allow": ["i1"], "deny": ["?"]}})
    assert answer.status_code == 200, answer.text
    # Of the second prompt: the first one has the item already.
    assert [(each["index"], each["item_id"]) for each in answer.json()["choices"]] == [(2, "i1")]
    answer = client.post("/v1/completions", json=body | {"filter": {"allow": []}})
    assert (answer.status_code, answer.json()["choices"], answer.json()["allowed_items"]) == (200, [], 0)


@pytest.mark.parametrize("name", ["..", ".hidden", "a b", "x" * 101])
def test_names_of_lists_are_those_of_files(client, name):
    answer = client.put(f"/v1/lists/{name}".replace("..", "%2E%2E"), json={"items": []})
    assert answer.status_code in (404, 405, 422)
    with pytest.raises(InputError, match="the name of a list"):
        ItemLists(None).put(name, [])


def test_replicas_share_lists_through_a_folder(tmp_path):
    now = 0.0
    one, other = (ItemLists(str(tmp_path), lambda: now) for _ in range(2))
    assert other.get("stock") is None
    one.put("stock", ["a"])
    assert other.get("stock") is None  # has just looked
    now = LOOK_EVERY_S
    assert other.get("stock").keys == {"a"}
    kept = other.get("stock")
    now += LOOK_EVERY_S
    assert other.get("stock") is kept
    one.put("stock", ["b"])
    now += LOOK_EVERY_S
    assert other.get("stock").keys == {"b"}
    assert other.names() == ["stock"]
    assert one.delete("stock")
    now += LOOK_EVERY_S
    assert other.get("stock") is None
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(InputError, match=r"bad\.json: expected"):
        one.get("bad")


def test_of_two_replicas_that_put_a_list_at_once_both_go_by_the_file(tmp_path, monkeypatch):
    """One that was overtaken between its write and its look took the other one's file for its own, for
    as long as nobody put the list again."""
    now = 0.0
    one, other = (ItemLists(str(tmp_path), lambda: now) for _ in range(2))
    written_whole = lists.written_whole

    @contextmanager
    def overtaken(path, on_disk):
        with written_whole(path, on_disk) as unfinished:
            yield unfinished
        monkeypatch.setattr(lists, "written_whole", written_whole)
        other.put("stock", ["b"])

    monkeypatch.setattr(lists, "written_whole", overtaken)
    one.put("stock", ["a"])
    now = LOOK_EVERY_S

    assert one.get("stock").keys == other.get("stock").keys == {"b"}


def test_a_damaged_list_is_told_and_can_be_deleted(tmp_path):
    run = make_run(tmp_path / "run", "sasrec")
    config = ServeConfig(page=False, lists=str(tmp_path / "lists"))
    with TestClient(load_api(run, config, PrometheusMeter())) as client:
        (tmp_path / "lists" / "stock.json").write_text("[")
        answer = client.get("/v1/lists/stock")
        assert answer.status_code == 500
        assert "put the list again" in answer.json()["error"]
        assert client.delete("/v1/lists/stock").json() == {"deleted": True}
        assert client.get("/v1/lists/stock").status_code == 404
        assert client.delete("/v1/lists/stock").status_code == 404


def test_several_replicas_without_a_folder_keep_no_lists(tmp_path):
    run = make_run(tmp_path, "sasrec")
    with TestClient(load_api(run, ServeConfig(page=False, num_replicas=2), PrometheusMeter())) as client:
        answer = client.put("/v1/lists/stock", json={"items": []})

    assert answer.status_code == 404
    assert "--lists FOLDER" in answer.json()["error"]


def test_of_names_that_somebody_made_up_not_all_are_remembered(tmp_path):
    """Each took memory for as long as the process lived."""
    lists = ItemLists(str(tmp_path))
    lists.put("stock", ["i1"])
    for number in range(2 * MOST_MISSING):
        assert lists.get(f"no_{number}") is None
    assert "stock" in lists._known
    assert len(lists._known) <= MOST_MISSING
    assert lists.get("stock").keys == {"i1"}

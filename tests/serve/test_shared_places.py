"""Models of one service that write to one place: those of the same items may, others may not."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from rayrec.platform.errors import InputError
from rayrec.serve.app import loading
from rayrec.serve.app.loading import check_models, load_models
from rayrec.serve.app.shared_places import SharedPlaces
from rayrec.serve.config.serve import ServeConfig


def catalog(first=0, number=40, title="film {}", kind="integer"):
    ids = list(range(first, first + number))
    titles = [None if title is None else title.format(each) for each in ids]
    items = SimpleNamespace(ids_I=np.array(ids), titles=pa.chunked_array([pa.array(titles, pa.string())]))
    return SimpleNamespace(items=items, manifest=SimpleNamespace(id_kinds={"user": "integer", "item": kind}))


FILMS = catalog()


def model(name, store="redis://host/0#shop", **more):
    return ServeConfig.parse({"name": name, "events": {"store": store}} | more)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (catalog(title="book {}"), "0 of 40 have the same title in both"),
        (catalog(first=1000), "0 of 40 are in both"),
        (catalog(kind="string"), "ids are"),
    ],
)
def test_models_of_other_items_are_refused_one_event_store(other, message):
    places = SharedPlaces()
    places.add(model("films"), FILMS)
    with pytest.raises(InputError, match=rf"events.store: .* of the model 'films', too.*{message}.*0#books"):
        places.add(model("books"), other)
    places.add(model("books", store="redis://host/0#books"), other)


@pytest.mark.parametrize(
    "store",
    ["redis://host#shop", "redis://HOST:6379/0#shop", "redis://me:secret@host:6379#shop"],
)
def test_a_store_is_the_same_however_it_is_written_and_a_password_is_not_said(store):
    places = SharedPlaces()
    places.add(model("films", store=store), FILMS)
    with pytest.raises(InputError, match="'films', too") as error:
        places.add(model("books", store="redis://host:6379/0#shop"), catalog(first=1000))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "other",
    [FILMS, catalog(number=80), catalog(first=39), catalog(title=None), catalog(title="book {}", number=10)],
    ids=["the same", "a later catalog", "hardly the same", "without titles", "few titles"],
)
def test_models_of_the_same_items_or_of_which_nothing_can_be_told_share_a_store(other):
    places = SharedPlaces()
    places.add(model("films"), FILMS)
    places.add(model("films-ranked"), other)


@pytest.mark.parametrize(
    ("store", "other", "are_one"),
    [
        ("redis://host?db=1", "redis://host?db=2", False),
        ("redis://host?db=1", "redis://host/1", True),
        ("redis://host/2?db=1", "redis://host/2", False),
        ("redis://[::1]", "redis://[::1]:6379/0", True),
        ("redis://[::1]:6379", "redis://[::2]:6379", False),
        ("redis://${HOST}:${PORT}", "redis://${HOST}:${PORT}/0", True),
    ],
)
def test_databases_and_addresses_are_those_that_the_client_takes(store, other, are_one):
    places = SharedPlaces()
    places.add(model("films", store=store), FILMS)
    if are_one:
        with pytest.raises(InputError, match="'films', too"):
            places.add(model("books", store=other), catalog(first=1000))
    else:
        places.add(model("books", store=other), catalog(first=1000))


def test_lists_of_other_items_are_refused_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = SharedPlaces()
    places.add(ServeConfig.parse({"name": "films", "lists": "lists"}), FILMS)
    places.add(ServeConfig.parse({"name": "films-ranked", "lists": "./lists/"}), FILMS)
    with pytest.raises(InputError, match=r"lists: .* is that of the model 'films', too"):
        places.add(
            ServeConfig.parse({"name": "books", "lists": str(tmp_path / "lists")}), catalog(first=1000)
        )


def test_a_service_looks_before_and_while_it_loads(monkeypatch):
    of_run = {"films": FILMS, "books": catalog(first=1000)}
    config = ServeConfig.parse(
        {
            "name": "films",
            "events": {"store": "redis://host"},
            "models": [{"name": "books", "run": "books", "events": {"store": "redis://host"}}],
        }
    )

    def loaded(run, *_):
        return SimpleNamespace(state=SimpleNamespace(catalog=lambda: of_run[run]))

    monkeypatch.setattr(loading, "check_service", lambda run, _: of_run[run])
    monkeypatch.setattr(loading, "load_api", loaded)
    monkeypatch.setattr(loading, "device_of", lambda run, _: "cpu")
    with pytest.raises(InputError, match=r"models: books: events.store: .* of the model 'films', too"):
        check_models("films", config)
    with pytest.raises(InputError, match=r"models: books: events.store: .* of the model 'films', too"):
        load_models("films", config, lambda run, name: None)

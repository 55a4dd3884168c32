"""Recipes: data with known truth, settings that say what the code says, and whole runs."""

import json
import random
from pathlib import Path

import pytest
import yaml

from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.checkout import CHECKOUT
from rayrec.samples.text.records import record_of
from rayrec.serve.language.config import ModelsConfig
from recipes import addresses, nearline, routing, tags
from recipes.__main__ import RECIPES, main
from recipes.addresses import data as addresses_data
from recipes.addresses import places
from recipes.nearline import data as nearline_data
from recipes.routing import data as routing_data
from recipes.routing import questions
from recipes.shared import read_lines

FOLDERS = [Path(package.__file__).parent for package in (addresses, nearline, routing, tags)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_settings_can_be_read_and_a_readme_says_how_to_run(folder):
    models = ModelsConfig.read(folder / "serve.yaml").models
    assert Path(models[0].run).is_relative_to(CHECKOUT / "runs" / "recipes" / folder.name)
    for file in folder.glob("*.yaml"):
        if file.stem != "serve":
            RunConfig.load(file)
    assert f"make recipe-{folder.name}" in (folder / "README.md").read_text()


def form_of(folder):
    return yaml.safe_load((folder / "run.yaml").read_text())["evaluation"]["form"]


def test_forms_of_settings_are_those_of_the_code():
    tags_data = pytest.importorskip("recipes.tags.data")

    assert form_of(FOLDERS[0])["labels"] == list(addresses_data.LABELS)
    assert form_of(FOLDERS[2])["json_schema"] == routing_data.SCHEMA
    assert form_of(FOLDERS[3])["json_schema"] == tags_data.SCHEMA


@pytest.mark.slow
@pytest.mark.parametrize("has_package", [True, False])
def test_labels_cover_addresses_and_no_town_is_in_two_sets(tmp_path, monkeypatch, has_package):
    if not has_package:
        monkeypatch.setattr(places, "_file_of_jionlp", lambda: None)
    elif places._file_of_jionlp() is None:
        pytest.skip("the package jionlp is not installed")
    addresses_data.make(tmp_path, small=True)

    texts = set()
    for name in ("train", "valid", "test", "unseen"):
        for values in read_lines(tmp_path / f"{name}.jsonl"):
            record = record_of(values, "spans")
            assert [span.start for span in record.spans] == [0, *(span.end for span in record.spans[:-1])]
            assert record.spans[-1].end == len(record.text)
            assert record.text not in texts
            texts.add(record.text)
    assert len(texts) == 300 + 40 * 3


def test_places_of_a_file_are_read_with_their_hierarchy(tmp_path):
    import zipfile

    lines = ["上海市\t310000\t上海", "\t上海市\t310000\t上海", "\t\t嘉定区\t310114\t嘉定"]
    lines += ["\t\t\t华亭镇", "\t\t\t\t北新村", "云南省\t530000\t云南", "\t临沧市\t530900\t临沧"]
    lines += ["\t\t凤庆县\t530921\t凤庆", "\t\t\t营盘镇", "\t\t\t\t三塔村"]
    with zipfile.ZipFile(tmp_path / "places.zip", "w") as archive:
        archive.writestr("china_location.txt", "\n".join(lines))

    first, second = places._read(tmp_path / "places.zip")

    assert first.names == ("上海市", "", "嘉定区", "华亭镇", "北新村")
    assert second.short == ("云南", "临沧", "凤庆", "", "")


def test_questions_of_the_test_have_wordings_and_names_of_their_own():
    draw = random.Random(0)
    train, unseen = (
        [next(records) for _ in range(200)]
        for records in (
            routing_data.asked(draw, set(), new_names=False, new_words=False),
            routing_data.asked(draw, set(), new_names=True, new_words=True),
        )
    )

    def answers(records):
        return [json.loads(record["completion"]) for record in records]

    assert {each["tool_name"] for each in answers(train)} == {*questions.TOOLS, questions.NONE}
    assert all(each["query"] in record["prompt"] for each, record in zip(answers(train), train, strict=True))
    asked = " ".join(record["prompt"] for record in unseen)
    assert not [product for product in questions.PRODUCTS if product in asked]


def test_what_users_want_next_is_in_no_file_of_the_log(tmp_path):
    import pandas as pd

    nearline_data.make(tmp_path, small=True)

    events = pd.read_parquet(tmp_path / "log" / "interactions.parquet")
    met = set(zip(events["user_id"], events["item_id"], strict=True))
    future = read_lines(tmp_path / "future.jsonl")
    assert not met & {(each["user_id"], each["item_id"]) for each in future}
    last = events.groupby("user_id").tail(2)
    assert last["item_id"].str.startswith("note").all()
    assert last["item_id"].is_unique
    planned = dict(zip(last["user_id"], last["scenario"], strict=True))
    assert planned == {each["user_id"]: each["theme"] for each in future}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_a_small_run_goes_from_data_to_figures(name, tmp_path):
    for package in ("transformers", "xgrammar", "sklearn", "pycrfsuite", "openai", "PIL"):
        pytest.importorskip(package, reason="of the extra recipes or language")

    assert main([name, "--small", "--out", str(tmp_path / "out")]) == 0

    figures = json.loads((tmp_path / "out" / "figures.json").read_text())["figures"]
    # These hold whatever a model has learned.
    held = {"rebuilt": 1.0, "valid JSON": 1.0, "invalid tags": 0.0, "coverage": 1.0}
    found = [(key, one["value"]) for row in figures.values() for key, one in row.items() if key in held]
    assert found
    assert [(key, held[key]) for key, _ in found] == found


def test_only_what_a_recipe_has_written_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.addresses.steps.run", lambda folder, small: (folder / "made").touch())
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").touch()

    assert main(["addresses", "--out", str(mine)]) == 1
    assert (mine / "thesis.txt").exists()
    assert main(["addresses", "--out", str(tmp_path / "new")]) == 0
    (tmp_path / "new" / "old").touch()
    assert main(["addresses", "--out", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {".made-by", "made"}

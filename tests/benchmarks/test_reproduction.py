"""Rows of the quality page on a tiny log: what is made, kept, recorded and refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from benchmarks import equal_tuning, quality_data, reproduction
from benchmarks.processes import ProcessorTime
from benchmarks.quality_data import Row
from benchmarks.quality_page import METRICS
from benchmarks.quality_pairs import are_of_one_recipe
from benchmarks.quality_rows import DATASETS, METHODS, NEIGHBORS, DataSet, Method, PublishedIds
from benchmarks.reproduction import OverCapError, commit_of, is_measured, main, measure
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.evaluation.lists import CO_VISITATION, MODEL
from rayrec.pipelines.metrics.positions import Positions
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.space import SearchSpace
from rayrec.platform.errors import InputError
from tests.helpers.data import random_events, write_source

ROW = Row("tiny", "shuffled", "tiny")


def test_a_row_is_made_recorded_and_on_the_page(sources, tmp_path):
    assert not is_measured(ROW)

    main([str(sources), ROW.name, "--local"])

    record = json.loads(ROW.record.read_text())
    assert (record["dataset"], record["ties"], record["method"], record["seed"]) == (*ROW.name.split("/"), 0)
    assert set(METRICS) <= set(record["results"][MODEL])
    assert record["lists"][MODEL]["depth"] >= 30
    assert record["slices"]["head items"]["results"].keys() == {MODEL}
    positions = Positions.read(tmp_path / "records" / record["positions"])
    found = positions.places[MODEL]
    assert np.mean(found < 10) == pytest.approx(record["results"][MODEL]["recall@10"]["value"])
    assert record["num_users"] == 40
    assert record["epochs"] == 1
    assert record["num_parameters"] > 0
    assert record["training_minutes"] > 0
    assert 0 < record["processor_minutes"] < 60
    assert record["made_of"]["commit"] == commit_of(reproduction.CHECKOUT)
    assert is_measured(ROW)
    (line,) = [
        line for line in (tmp_path / "quality.md").read_text().splitlines() if line.startswith("| tiny")
    ]
    assert "CPU min)" in line


def test_rows_on_servers_are_counted_as_parameters_as_those_of_the_network_are(sources, monkeypatch):
    monkeypatch.setitem(DATASETS, "tiny", dataclasses.replace(DATASETS["tiny"], has_text=False))

    def counts(settings: tuple[str, ...]) -> tuple[int, int]:
        method = dataclasses.replace(METHODS["tiny"], settings=settings)
        monkeypatch.setitem(METHODS, "tiny", method)
        assembly = assemble(quality_data.row_config(ROW, quality_data.data_settings(ROW, method, sources)))
        dense = sum(parameter.numel() for parameter in assembly.task.network().parameters())
        return dense, reproduction._sparse_parameters(assembly)

    dense, none = counts(())
    network, rows = counts(("model.prefix_matrix=sparse",))
    assert none == 0
    assert 0 < network < dense == network + rows


def test_a_method_with_words_has_a_tokenizer_of_the_titles_of_its_data(sources, tmp_path, monkeypatch):
    titles = {
        "item_id": [f"i{number}" for number in range(30)],
        "title": [f"Quixotic {number}" for number in range(30)],
    }
    write_source(tmp_path / "sources" / "log", random_events(40, 30), items=titles)
    method = dataclasses.replace(METHODS["tiny"], words=300)

    settings = dict(each.split("=") for each in quality_data.data_settings(ROW, method, sources))

    tokenizer = Tokenizer.from_file(str(Path(settings["model.tokenizer"]) / "tokenizer.json"))
    assert len(tokenizer.encode("Quixotic").ids) == 1
    assert len(tokenizer.encode("Melville").ids) > 1


def test_records_of_other_benches_lie_beside_those_of_the_page(sources, tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "capacity-real.json").write_text('{"rows": []}')

    main(["--table"])

    assert "Recommendation quality" in (tmp_path / "quality.md").read_text()


@pytest.mark.slow
def test_neighbors_are_a_row_without_training(sources, tmp_path):
    row = Row("tiny", "shuffled", NEIGHBORS)
    assert Row.named(row.name, 0) == row

    main([str(sources), row.name])

    record = json.loads((tmp_path / "records" / "neighbors" / "tiny-shuffled.json").read_text())
    positions = Positions.read(tmp_path / "records" / "neighbors" / record["positions"])
    assert (
        np.mean(positions.places[CO_VISITATION] < 5) == record["results"][CO_VISITATION]["recall@5"]["value"]
    )
    assert (record["run"], record["num_users"]) == ("tiny", 40)
    assert record["results"][CO_VISITATION]["recall@10"]["value"] > 0
    assert is_measured(row)


def test_published_ids_are_imported_and_items_without_text_get_those_of_interactions(
    sources, tmp_path, monkeypatch
):
    codes = {f"i{item}": [item % 4, item % 3] for item in range(30)}
    (sources / "log" / "codes.json").write_text(json.dumps(codes))
    few = {"allow": ["short-users", "cold-items"]}
    log = DataSet("A tiny log", "log", prepare=few, published_ids=PublishedIds("codes.json"))
    monkeypatch.setitem(DATASETS, "tiny", log)
    published, both = (Method("tiny", str(tmp_path / "recipe"), name) for name in ("published", "both"))

    _, ids = (setting.split("=")[1] for setting in quality_data.data_settings(ROW, published, sources))
    registry = SemanticIdRegistry.load(ids)
    assert registry.method.startswith("published")
    assert (registry.num_codebooks, registry.codes_IL.shape[1]) == (2, 3)  # and a digit for collisions

    monkeypatch.setitem(DATASETS, "tiny", dataclasses.replace(log, has_text=False, published_ids=None))
    _, ids = (setting.split("=")[1] for setting in quality_data.data_settings(ROW, both, sources))
    assert "interactions" in SemanticIdRegistry.load(ids).method or "semantic_ids-interactions" in ids
    with pytest.raises(InputError, match="nobody's semantic IDs are there"):
        quality_data.data_settings(ROW, published, sources)


def test_ids_of_a_model_are_made_of_what_another_method_has_learned(sources, monkeypatch):
    teacher = dataclasses.replace(METHODS["tiny"], settings=("model.softmax=items",))
    monkeypatch.setitem(METHODS, "teacher", teacher)
    monkeypatch.setitem(METHODS, "tiny", dataclasses.replace(METHODS["tiny"], vectors="teacher"))

    first = kept(sources)
    vectors_ID = np.load(first[1].parent / "vectors" / "items.npy")

    assert len(vectors_ID) == len(SemanticIdRegistry.load(first[1]).item_ids_I) == 30
    assert "of teacher" in SemanticIdRegistry.load(first[1]).method
    assert kept(sources) == first
    # What the teacher is trained with is part of the recipe; a setting that came later has its default.
    record = {"made_of": quality_data.made_of(ROW)}
    del record["made_of"]["teacher"]["settings"]["model"]["window_step"]
    assert are_of_one_recipe(record, {"made_of": quality_data.made_of(ROW)})
    for change in (
        {"settings": (*teacher.settings, "training.epochs=2")},
        {"max_codebook_size": 4},
    ):
        monkeypatch.setitem(METHODS, "teacher", dataclasses.replace(teacher, **change))
        assert not are_of_one_recipe(record, {"made_of": quality_data.made_of(ROW)})
        assert kept(sources)[1] != first[1]


def test_a_source_that_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(quality_data, "KEPT", tmp_path / "kept")
    with pytest.raises(InputError, match=r"SOURCES has to hold yelp-s3rec, Yelp"):
        quality_data.data_settings(Row("yelp", "shuffled", "sasrec"), METHODS["sasrec"], tmp_path)


def test_a_row_that_trains_too_long_fails_with_its_name(sources, monkeypatch):
    monkeypatch.setattr(ProcessorTime, "seconds", 60 * reproduction.CAP_MINUTES + 1)

    with pytest.raises(OverCapError, match="tiny/shuffled/tiny, seed 0: step 1 of"):
        measure(ROW, sources, "commit", in_process)


@pytest.mark.slow
def test_a_run_that_is_kept_is_trained_once(sources, tmp_path, monkeypatch):
    """As one that was interrupted behind its training: what it cost is not known any more."""
    first = measure(ROW, sources, "commit", in_process, tmp_path / "runs")
    monkeypatch.setattr(ProcessorTime, "seconds", 1e6)  # any step would be one too many

    again = measure(ROW, sources, "commit", in_process, tmp_path / "runs")

    assert again["results"] == first["results"]
    assert "processor_minutes" in first
    assert "processor_minutes" not in again


def kept(sources) -> list[Path]:
    """Folders of data and IDs that a row trains on."""
    return [
        Path(setting.split("=")[1]) for setting in quality_data.data_settings(ROW, METHODS["tiny"], sources)
    ]


def test_what_is_kept_is_whole_and_of_the_settings_asked_for(sources, monkeypatch):
    data, ids = kept(sources)
    written = (ids / "registry.json").stat().st_mtime_ns
    assert kept(sources) == [data, ids]
    assert (ids / "registry.json").stat().st_mtime_ns == written

    # As a tokenize leaves it that was interrupted: the registry comes last.
    (ids / "registry.json").unlink()
    assert kept(sources) == [data, ids]
    SemanticIdRegistry.load(ids)

    others = {"allow": ["short-users", "cold-items"], "seed": 5}
    monkeypatch.setitem(DATASETS, "tiny", DataSet("A tiny log", "log", prepare=others))
    assert kept(sources)[0] != data


def test_a_commit_is_dirty_where_something_differs_that_decides(tmp_path):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    for name in ("rayrec/a.py", "configs/a.yaml", "benchmarks/a.py", "docs/quality.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = commit_of(tmp_path)
    assert len(clean) == 12

    (tmp_path / "docs" / "quality.md").write_text("another table")
    (tmp_path / "benchmarks" / "quality").mkdir()
    (tmp_path / "benchmarks" / "quality" / "a-new-record.json").write_text("{}")
    assert commit_of(tmp_path) == clean
    for name in ("rayrec/a.py", "configs/a.yaml", "benchmarks/a.py"):
        (tmp_path / name).write_text("two")
        assert commit_of(tmp_path) == clean + "-dirty"
        git("checkout", name)
    assert commit_of(tmp_path) == clean


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def kept_searches(folder: Path) -> list[Path]:
    return list((folder / "records" / "searches").glob("*/search.json"))


@pytest.fixture
def search(sources, tmp_path, monkeypatch) -> list[str]:
    """Arguments of a search of two trials."""
    write_budget(tmp_path)
    monkeypatch.setattr(equal_tuning, "BUDGET", tmp_path / "budget.yaml")
    return [str(sources), ROW.name, "--searches", str(tmp_path / "searches")]


def write_budget(folder: Path, **more: Any) -> None:
    budget = {
        "config": "that of the row",
        "trials": 2,
        "metric": "ndcg@10",
        "space": {"training.optimizer.learning_rate": {"kind": "float", "low": 0.001, "high": 0.01}},
    }
    (folder / "budget.yaml").write_text(yaml.safe_dump(budget | more))


@pytest.mark.parametrize(
    "method", [name for name in METHODS if name != "causal-lm-words"]
)  # it has no dropout
def test_equal_tuning_can_begin_with_the_recipe_of_each_method(method, tmp_path):
    """The model of words and codes has no dropout that could be searched."""
    recipe = quality_data.row_config(Row("movielens", "shuffled", method))
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    tuning = TuningConfig.load(equal_tuning.BUDGET, [f"config={tmp_path / 'recipe.yaml'}"])
    tuning = tuning.model_copy(update={"space": equal_tuning.space_in(recipe, tuning.space)})

    first = SearchSpace.of(tuning).settings_of_base()

    assert len(first) == 4


@pytest.mark.slow
def test_a_search_whose_folder_is_lost_goes_on_from_what_is_kept(search, tmp_path, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(equal_tuning, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            equal_tuning.main(search)
    assert len(kept_searches(tmp_path)) == 1
    shutil.rmtree(tmp_path / "searches")  # as .cache is easily lost

    another = pytest.raises(InputError, match="the search of another recipe, budget or space is kept here")
    write_budget(tmp_path, seed=7)
    with another:
        equal_tuning.main(search)
    write_budget(tmp_path)
    with monkeypatch.context() as changed:
        changed.setattr(equal_tuning, "made_of", lambda row: {"settings": "others"})
        with another:
            equal_tuning.main(search)

    equal_tuning.main(search)

    assert kept_searches(tmp_path) == []
    trained = list((tmp_path / "searches" / ROW.record.stem / "trials").iterdir())
    assert len(trained) == 1  # of two trials, the one that leads was trained again
    assert (tmp_path / "records" / "tuned" / ROW.record.name).is_file()


@pytest.mark.slow
def test_a_row_is_tuned_and_is_on_the_page_beside_the_one_of_its_recipe(search, sources, tmp_path):
    main([str(sources), ROW.name, "--local"])

    equal_tuning.main(search)

    path = tmp_path / "records" / "tuned" / ROW.record.name
    record = json.loads(path.read_text())
    told = record["search"]
    assert told["trials"] == {"complete": 2, "pruned": 0, "failed": 0}
    assert told["of_best"] >= told["of_recipe"]
    assert record["made_of"]["settings"]["training"]["optimizer"]["learning_rate"] == pytest.approx(
        told["settings"]["training.optimizer.learning_rate"]
    )
    positions = Positions.read(path.parent / record["positions"])
    found = record["results"][MODEL]["recall@10"]["value"]
    assert np.mean(positions.places[MODEL] < 10) == pytest.approx(found)
    lines = [line for line in (tmp_path / "quality.md").read_text().splitlines() if line.startswith("| tiny")]
    assert [f"| {found:.4f} ±" in line for line in lines][1]
    assert "| 2 (0) |" in lines[1]
    assert "tiny, shuffled, tuned" in (tmp_path / "quality.csv").read_text()

    equal_tuning.main(search)  # the search is over, and is not begun again

    again = json.loads(path.read_text())
    assert again["search"] == told
    assert again["results"] == record["results"]

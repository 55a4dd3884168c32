"""A tiny published log, a recipe for it, and places for what is measured."""

from pathlib import Path

import pytest
import yaml

from benchmarks import quality_data, quality_page
from benchmarks.quality_rows import DATASETS, METHODS, DataSet, Method
from tests.helpers.data import random_events, write_source
from tests.helpers.runs import MODELS


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A log, a recipe of one epoch, and places for records, page and what is kept."""
    write_source(tmp_path / "sources" / "log", random_events(40, 30))
    settings = {
        "data": {"path": "data"},
        "model": MODELS["prefix"],
        "training": {"epochs": 1, "batch_size": 16},
        "pipeline": {"trainer_threads": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    few = {"allow": ["short-users", "cold-items"]}
    monkeypatch.setitem(DATASETS, "tiny", DataSet("A tiny log", "log", prepare=few))
    monkeypatch.setitem(METHODS, "tiny", Method("tiny", str(tmp_path / "recipe"), "interactions"))
    monkeypatch.setattr(quality_data, "KEPT", tmp_path / "kept")
    for module in (quality_data, quality_page):
        monkeypatch.setattr(module, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(quality_page, "FOLDER", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(quality_page.README.read_text())
    monkeypatch.setattr(quality_page, "README", readme)
    return tmp_path / "sources"

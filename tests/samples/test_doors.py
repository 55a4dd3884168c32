"""Feature operations and importers of other packages: those of the guides, installed as packages are."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry, settings_union
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers import IMPORTERS, load_source
from rayrec.samples.operations.config import OPERATIONS, RENAMED
from rayrec.samples.operations.operation import OperationSettings
from rayrec.samples.operations.program import FeatureProgram
from tests.helpers.feature_operations import Declared

REPO = Path(__file__).parents[2]
GUIDES = REPO / "docs" / "guides"
EXAMPLES = GUIDES / "examples"


def installed(site: Path, project: Path) -> None:
    """Copy a package and write what an installer writes beside it."""
    described = tomllib.loads((project / "pyproject.toml").read_text())
    name, version = described["project"]["name"], described["project"]["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = described["project"]["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module in described["tool"]["setuptools"]["py-modules"]:
        (site / f"{module}.py").write_text((project / f"{module}.py").read_text())


def run(site: Path, *arguments: str) -> str:
    """What a process prints that has the packages of `site` installed."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{REPO}"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FEATURES = """
import sys
from rayrec import Dataset, RunConfig
from rayrec.platform.errors import InputError
from rayrec.samples import FeatureProgram
import pyarrow as pa

features = [{"op": "standardize", "input": "price", "output": "z", "mean": 12.5, "std": 4.0}]
config = RunConfig.parse({"model": {"name": "sasrec"}, "data": {"path": sys.argv[1], "features": features}})
program = FeatureProgram.compile(config.data.features, pa.schema({"price": pa.float64()}))
print(program.one({"price": 20.5}), program.one({"price": None}))
print(*sorted(Dataset.open(sys.argv[1]).items.keys.to_pylist()))
try:
    RunConfig.parse({"data": {"path": sys.argv[1], "features": [{**features[0], "meen": 1}]}})
except InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_packages_of_the_guides_add_a_layout_and_an_operation(tmp_path):
    site, log, data = tmp_path / "site", tmp_path / "log.jsonl", tmp_path / "data"
    installed(site, EXAMPLES / "importer")
    installed(site, EXAMPLES / "operation")
    events = [(user, f"item{item}", 100 + item) for user in (1, 2) for item in range(4)]
    log.write_text(
        "".join(f'{{"customer": {u}, "item_id": "{i}", "timestamp": {t}}}\n' for u, i, t in events)
    )

    run(site, "-m", "rayrec", "prepare", f"{log}", f"{data}", "--layout-setting", "user=customer", "--no-ray")
    computed, items, refused = run(site, "-c", FEATURES, str(data)).splitlines()

    assert json.loads((data / "dataset.json").read_text())["layout"] == "jsonl"
    assert computed == "{'price': 20.5, 'z': 2.0} {'price': None, 'z': None}"
    assert items == "item0 item1 item2 item3"
    assert "there is no setting 'data.features.0.meen'; did you mean 'mean'?" in refused


def test_the_snippet_of_the_guide_runs(tmp_path):
    installed(tmp_path / "site", EXAMPLES / "operation")
    *_, snippet = (GUIDES / "add-a-feature-operation.md").read_text().split("```python\n")

    assert run(tmp_path / "site", "-c", snippet.split("```")[0]) == "{'price': 20.5, 'price_z': 2.0}\n"


@pytest.mark.parametrize(
    ("guide", "example"), [("add-a-feature-operation", "operation"), ("add-an-importer", "importer")]
)
def test_guides_show_their_example_in_full(guide, example):
    text = (GUIDES / f"{guide}.md").read_text()

    for file in (EXAMPLES / example).iterdir():
        if file.is_file():
            assert file.read_text() in text


class Doubled(OperationSettings):
    op: Literal["double"] = "double"
    input: str

    def bind(self, schema):
        return self

    @property
    def inputs(self):
        return (self.input,)

    @property
    def outputs(self):
        return {self.input: pa.int64()}


def union_with(value: str) -> type[Config]:
    log = "rayrec.samples.operations.arithmetic:LogarithmConfig"
    table = Registry("rayrec.tests", "feature operation", {"double": value, "log": log})
    return type(
        "Declared",
        (Config,),
        {"__annotations__": {"feature": settings_union(table, OperationSettings, "op")}},
    )


def test_unknown_operations_are_answered_with_all_names():
    declared = union_with(f"{__name__}:Doubled")

    with pytest.raises(InputError, match=r"feature.op: expected one of 'double', 'log', got 'tripple'"):
        declared.parse({"feature": {"op": "tripple"}})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "collections:Counter",
            "'double' is <class 'collections.Counter'>, expected a subclass of Operation",
        ),
        (
            "rayrec.samples.operations.fill:FillConfig",
            r"needs the field `op: Literal\['double'\] = 'double'`",
        ),
    ],
)
def test_what_is_no_operation_of_its_name_is_refused(value, message):
    with pytest.raises(InputError, match=message):
        union_with(value)


def test_code_of_other_packages_is_part_of_the_fingerprint(tmp_path, monkeypatch):
    schema = pa.schema({"x": pa.int64()})
    module = tmp_path / "double.py"
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(module))

    def fingerprint(code: str) -> str:
        module.write_text(code)
        return FeatureProgram.compile([Doubled(input="x")], schema).fingerprint

    assert fingerprint("a = 1") == fingerprint("a = 1") != fingerprint("a = 2")


def test_operations_are_read_by_their_names_of_0_1():
    declared = Declared.parse(
        {
            "features": [
                {"op": "cut", "inputs": ["items"], "length": 2},
                {"op": "age", "input": "time", "relative_to": "now", "output": "since"},
                {"op": "bucketise", "input": "price", "boundaries": [1]},
            ]
        }
    )

    assert [config.op for config in declared.features] == ["truncate", "time_since", "bucketize"]


def test_old_names_of_operations_are_no_names_of_others():
    assert not RENAMED.keys() & set(OPERATIONS.names())
    assert set(RENAMED.values()) <= set(OPERATIONS.names())


def test_an_unknown_layout_is_answered_with_the_known_ones(tmp_path):
    with pytest.raises(InputError, match="there is no layout 'xml'; known: recbole, movielens, folder,"):
        load_source(tmp_path, PrepareConfig(layout="xml"))


def test_settings_that_a_layout_does_not_have_are_refused(tmp_path):
    (tmp_path / "log.csv").write_text("user,item,time\na,b,1\n")

    with pytest.raises(InputError, match="layout_settings of events: there is no setting 'user'"):
        load_source(tmp_path, PrepareConfig(layout_settings={"user": "customer"}))


@pytest.mark.slow
def test_the_command_names_our_layouts():
    help_text = run(REPO, "-m", "rayrec", "prepare", "--help")

    assert all(name in help_text for name in IMPORTERS.names())

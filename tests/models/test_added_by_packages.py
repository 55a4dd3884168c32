"""Models, tokenizers and item vectors that other packages bring: those of docs/guides/examples."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rayrec

ROOT = Path(rayrec.__file__).parents[1]
EXAMPLES = ROOT / "docs" / "guides" / "examples"
KINDS = ("model", "ctr_model", "tokenizer", "item_vectors")


def install(site: Path, project: Path) -> None:
    """As pip does: the modules, and what the package says about itself."""
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    name = settings["project"]["name"]
    for module in settings["tool"]["setuptools"]["py-modules"]:
        (site / f"{module}.py").write_text((project / f"{module}.py").read_text())
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in settings["project"]["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def python(site: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: the models of a run's settings are known from the start."""
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
def test_the_packages_of_the_guides_train_evaluate_recommend_score_and_tokenize(tmp_path):
    (site := tmp_path / "site").mkdir()
    for kind in KINDS:
        install(site, EXAMPLES / kind)

    done = python(site, "-m", "tests.models.added_by_packages", tmp_path)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(KINDS)


def test_the_guides_show_the_packages_as_they_are():
    for page, kinds in {
        "add-a-model.md": ("model", "ctr_model"),
        "add-a-tokenizer.md": ("tokenizer",),
        "add-item-vectors.md": ("item_vectors",),
    }.items():
        text = (EXAMPLES.parent / page).read_text()
        for file in [file for kind in kinds for file in (EXAMPLES / kind).iterdir() if file.is_file()]:
            assert file.read_text().strip() in text, f"{page} shows another {file.name}"


@pytest.mark.slow
def test_models_that_cannot_be_used_are_named_in_one_sentence(tmp_path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    module = "from typing import Literal\nfrom rayrec.models.sequence.config import SequenceModelConfig\n"
    (tmp_path / "other_name.py").write_text(
        f"{module}class Tiny(SequenceModelConfig):\n    name: Literal['small']\n"
    )
    (tmp_path / "fails.py").write_text("import nothing_of_this_name")
    for target, message in {
        "fails:Tiny": "the model 'tiny' of the package 'broken' cannot be imported",
        "json:loads": "expected a subclass of SequenceModelConfig or ImpressionModelConfig",
        "other_name:Tiny": "needs the field `name: Literal['tiny'] = 'tiny'`",
    }.items():
        (info / "entry_points.txt").write_text(f"[rayrec.models]\ntiny = {target}\n")

        done = python(tmp_path, "-c", "import rayrec.models.registry")

        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]

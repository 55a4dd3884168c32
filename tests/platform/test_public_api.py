"""What the package and its rooms export, and that whoever reads the examples needs nothing else."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rayrec

CHECKOUT = Path(rayrec.__file__).parents[1]
ROOMS = ("samples", "embeddings", "models", "pipelines", "rl", "serve", "platform")


@pytest.mark.parametrize("name", ["rayrec", *(f"rayrec.{room}" for room in ROOMS)])
def test_every_public_name_is_there(name):
    module = importlib.import_module(name)

    assert module.__all__
    for public in module.__all__:
        assert getattr(module, public) is not None
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing_of_this_name'"):
        _ = module.nothing_of_this_name


def test_rooms_are_attributes_of_the_package():
    program = "import rayrec; rayrec.samples.Dataset; rayrec.platform.InputError"

    subprocess.run([sys.executable, "-c", program], check=True, cwd=CHECKOUT, timeout=60)


def test_examples_import_no_deeper_than_the_rooms():
    files = [*(CHECKOUT / "examples").glob("*.py"), *(CHECKOUT / "docs" / "guides").rglob("*.py")]
    deeper = [
        f"{file.relative_to(CHECKOUT)} imports {node.module}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rayrec.")
        if node.module not in {*(f"rayrec.{room}" for room in ROOMS), "rayrec.adapters.torchrec"}
    ]

    assert len(files) > 8
    assert not deeper

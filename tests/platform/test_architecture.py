"""Imports run one way, and the rooms that need no Ray have none."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rayrec

PACKAGE = Path(rayrec.__file__).parent

MAY_IMPORT = {
    "platform": set(),
    "samples": {"platform"},
    "embeddings": {"platform"},
    "models": {"platform"},
    "adapters": {"platform", "samples", "embeddings", "models"},
    "actors": {"platform", "samples", "embeddings", "models"},
    "pipelines": {"platform", "samples", "embeddings", "models", "actors"},
    "rl": {"platform", "samples", "embeddings", "models", "actors", "pipelines"},
    "serve": {"platform", "samples", "embeddings", "models", "actors", "pipelines"},
    "cli": {"platform", "samples", "embeddings", "models", "actors", "pipelines", "rl", "serve"},
}
"""Room to the rooms below it: cli, then serve, rl and pipelines, actors, the three data rooms, platform.

`adapters` stands beside actors: models of other libraries on the data rooms, which no room needs.
"""

WITHOUT_RAY = ("samples", "embeddings", "models", "adapters")
RAY_DATA_JOBS = PACKAGE / "samples" / "ray_jobs.py"

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imported(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide the room"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def label(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_rooms_import_only_the_rooms_below_them(path):
    room = path.relative_to(PACKAGE).parts[0]
    own = {
        name.removeprefix("rayrec.").split(".")[0] for name in imported(path) if name.startswith("rayrec.")
    }

    assert own - {room, "__version__"} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", [p for p in MODULES if label(p).split("/")[0] in WITHOUT_RAY], ids=label)
def test_data_rooms_do_without_ray(path):
    packages = {name.split(".")[0] for name in imported(path)}

    assert ("ray" in packages) == (path == RAY_DATA_JOBS)


CONTROL = ("controller.py", "training.py", "run.py")
"""Of `rl`: who says what runs where."""


@pytest.mark.parametrize("path", [p for p in MODULES if label(p).split("/")[0] == "rl"], ids=label)
def test_reinforcement_learning_does_without_ray_but_for_its_control(path):
    packages = {name.split(".")[0] for name in imported(path)}
    assert "ray" not in packages or path.name in CONTROL


def test_models_import_with_torch_and_numpy_alone():
    """Every module of the room but its settings, in a process that has nothing else."""
    modules = [
        "rayrec." + label(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in MODULES
        if label(path).startswith("models/") and path.name != "config.py"
    ]
    blocked = [
        "pydantic",
        "pandas",
        "scipy",
        "ray",
        "numba",
        "pyarrow",
        "yaml",
        "safetensors",
        "transformers",
        "keras",
        "tensorflow",
    ]
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked}))\n"  # None in sys.modules: the import fails
        f"for name in {modules}: importlib.import_module(name)\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent, timeout=120)


def test_importing_the_package_imports_neither_ray_nor_torch():
    program = "import sys, rayrec; assert not {'ray', 'torch'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent, timeout=60)


def test_what_reads_rows_and_computes_features_starts_without_torch():
    # A process of these is started anew whenever one dies; torch takes longer than all the rest.
    modules = "rayrec.pipelines.tasks.features, rayrec.actors.feature_worker, rayrec.actors.sample_reader"
    program = f"import sys, {modules}; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent, timeout=60)

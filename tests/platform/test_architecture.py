"""Imports run one way between rooms and inside them, and the rooms that need no Ray have none."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rayrec
from tests.helpers.examples import cases

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
    "jobs": {"platform", "samples", "embeddings", "models", "actors", "pipelines"},
    "cli": {"platform", "samples", "embeddings", "models", "actors", "pipelines", "rl", "serve", "jobs"},
}
"""Room to the rooms below it: cli, then serve, rl, jobs, pipelines, actors, the three data rooms, platform.

`adapters` stands beside actors: models of other libraries on the data rooms, which no room needs.
"""

ORDER = {
    "samples": "base > dataset importers > prepare > stores text > graph > operations"
    " > reading features impressions",
    "embeddings": "base > optim > config > storage > table > shard snapshot > transport capacity > lookup",
    "models": "base decoding tokenizers > attention generation quantization > program > language"
    " > sequence > generative ctr > keras > registry > compiled_ranking",
    "pipelines": "config metrics > runs > tasks cluster > inference semantic_ids > versions evaluation"
    " > training nearline quantization > tuning health capacity",
    "serve": "config local_calls > wire > events > engine > admission routing > protocols > web > rpc"
    " > app language"
    " > on_ray > launch",
}
"""Inside a room, a sub-package imports only those to the left of its `>`; side by side are peers."""

WITHOUT_RAY = ("samples", "embeddings", "models", "adapters")
RAY_JOBS = [
    PACKAGE / "samples" / "prepare" / "ray_jobs.py",
]

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node, without the expressions in them: these are most of a file, and import nothing."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            if not isinstance(child, ast.Expr):
                yield from statements(child)


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names of every module that a file imports, anywhere in it."""
    names = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide the room"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def label(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def dotted(path: Path) -> str:
    return "rayrec." + label(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def room_of(path: Path) -> str:
    return label(path).split("/")[0]


def test_rooms_import_only_the_rooms_below_them():
    wrong = [
        f"{label(path)} imports {name}"
        for path in MODULES
        for name in imported(path)
        if name.startswith("rayrec.")
        and name.split(".")[1] not in {room_of(path), "__version__", *MAY_IMPORT[room_of(path)]}
    ]

    assert not wrong


def test_sub_packages_import_only_those_below_them():
    wrong = []
    for room, order in ORDER.items():
        layers = [layer.split() for layer in order.split(">")]
        level = {name: number for number, layer in enumerate(layers) for name in layer}
        for path in MODULES:
            if room_of(path) != room or path == PACKAGE / room / "__init__.py":
                continue
            own = label(path).split("/")[1].removesuffix(".py")
            assert own in level, f"{label(path)}: {own} has no place in the order of {room}"
            for name in imported(path):
                parts = name.split(".")
                is_other = parts[:2] == ["rayrec", room] and len(parts) > 2 and parts[2] != own
                if is_other and level[parts[2]] >= level[own]:
                    wrong.append(f"{label(path)} imports {name}")

    assert not wrong


def test_no_files_import_each_other_in_a_circle():
    files = {dotted(path): path for path in MODULES}
    edges = {name: {other for other in imported(path) if other in files} for name, path in files.items()}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in edges[name] - {name}:
                visit(other, [*way, name])
            done.add(name)

    for name in files:
        visit(name, [])


def test_data_rooms_do_without_ray():
    with_ray = [
        path
        for path in MODULES
        if room_of(path) in WITHOUT_RAY and "ray" in {name.split(".")[0] for name in imported(path)}
    ]

    assert with_ray == RAY_JOBS


def test_reinforcement_learning_calls_ray_through_its_actors_alone():
    with_ray = [
        path
        for path in MODULES
        if room_of(path) == "rl" and "ray" in {name.split(".")[0] for name in imported(path)}
    ]

    assert not with_ray


def test_every_sub_package_says_what_it_holds():
    silent = [
        label(path)
        for path in MODULES
        if path.name == "__init__.py" and ast.get_docstring(ast.parse(path.read_text())) is None
    ]

    assert not silent


NUMERIC = ("base", "attention", "decoding", "program")
"""Of `models`: arithmetic for anyone who has torch."""


def test_models_import_with_torch_numpy_pydantic_and_yaml_alone():
    """Every module of the room, in a process that has nothing else; arithmetic without the last two."""
    modules = [path for path in MODULES if room_of(path) == "models"]
    numeric = [
        dotted(path)
        for path in modules
        if label(path).split("/")[1] in NUMERIC and path != PACKAGE / "models" / "base" / "config.py"
    ]
    blocked = [
        "pandas",
        "scipy",
        "ray",
        "numba",
        "pyarrow",
        "safetensors",
        "transformers",
        "keras",
        "tensorflow",
    ]
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked} + ['pydantic', 'yaml']))\n"  # None: the import fails
        f"for name in {numeric}: importlib.import_module(name)\n"
        "del sys.modules['pydantic'], sys.modules['yaml']\n"
        f"for name in {[dotted(path) for path in modules]}: importlib.import_module(name)\n"
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


@pytest.mark.parametrize("packages", cases(["numpy, asyncio", "torch, asyncio"], ["numpy, asyncio"]))
def test_other_packages_import_from_a_shell_that_stands_inside_the_package(packages):
    # `platform/` is found there in the place of the standard module.
    program = (
        f"import {packages}, platform, sys\n"
        "assert platform.system() and platform.__name__ == 'platform'\n"
        "sys.path.insert(0, '..'); import rayrec.platform.errors"
    )

    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE, timeout=120)


def test_only_the_room_platform_has_the_name_of_a_standard_module():
    """Wherever a shell stands, the standard library and torch import what they mean."""
    others = {*sys.stdlib_module_names, "ray", "torch", "numpy"}
    modules = [path for path in PACKAGE.rglob("*") if path.is_dir() or path.suffix == ".py"]
    hidden = [label(path) for path in modules if path.stem in others]

    assert hidden == ["platform"]

"""Where builders are found and how their mistakes are said; neither Keras nor TensorFlow is needed."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rayrec.models.keras.builder import Builder
from rayrec.platform.errors import InputError
from tests.models.keras.impressions import DIM, SCHEMA


def made(name: str, folder: Path | None = None, **arguments: Any) -> Any:
    builder = Builder(name, folder)
    with builder.running():
        return builder(SCHEMA, DIM, arguments)


def folder_of(path: Path, **modules: str) -> Path:
    for name, source in modules.items():
        (path / name.replace("__", "/")).with_suffix(".py").parent.mkdir(parents=True, exist_ok=True)
        (path / name.replace("__", "/")).with_suffix(".py").write_text(textwrap.dedent(source))
    return path


WITH_A_NEIGHBOR = """
    import my_neighbor

    def build(schema, dim):
        import my_late_neighbor

        def call():
            import my_neighbor as again

            return again.NAME

        return my_neighbor.NAME, my_late_neighbor.NAME, call
"""


def test_two_folders_with_modules_of_the_same_names_are_two_builders(tmp_path):
    first, second = (
        folder_of(
            tmp_path / name,
            my_model=WITH_A_NEIGHBOR,
            my_neighbor=f"NAME = {name!r}",
            my_late_neighbor=f"NAME = 'late {name}'",
        )
        for name in ("first", "second")
    )

    for folder, name in ((first, "first"), (second, "second"), (first, "first")):
        *names, call = made("my_model:build", folder)
        assert [*names, call()] == [name, f"late {name}", name]


def test_a_folder_does_not_find_the_neighbors_of_another_one(tmp_path):
    first = folder_of(tmp_path / "first", my_model="import my_helper\nbuild = lambda *_: 1", my_helper="")
    second = folder_of(tmp_path / "second", my_model="import my_helper\nbuild = lambda *_: 2")
    assert made("my_model:build", first) == 1

    with pytest.raises(InputError, match=r"'my_model' cannot be imported \(No module named 'my_helper'\)"):
        made("my_model:build", second)


def test_modules_of_a_folder_are_found_while_its_builder_runs_and_never_before_the_standard_library(tmp_path):
    folder = folder_of(
        tmp_path,
        my_model="import colorsys, json\ndef build(schema, dim): return colorsys.__file__, json.__file__",
        colorsys="",
        json="",
        my_bystander="",
    )
    sys.modules.pop("colorsys", None)
    paths = list(sys.path)

    found = made("my_model:build", folder)

    assert not any(path.startswith(str(folder)) for path in found)
    assert sys.path == paths
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("my_bystander")


def test_a_builder_may_be_a_module_of_a_package_of_a_folder(tmp_path):
    folder = folder_of(
        tmp_path, my_package__model="from . import parts\nbuild = lambda *_: parts.NAME", my_package__parts=""
    )
    (folder / "my_package" / "parts.py").write_text("NAME = 'part'\n")

    assert made("my_package.model:build", folder) == "part"


def test_a_builder_that_was_imported_by_other_ways_is_the_same_module():
    checkout = Path(__file__).parents[3]
    module = importlib.import_module("tests.models.keras.networks")

    assert made("tests.models.keras.test_keras_builder:here", checkout) is made(
        "tests.models.keras.test_keras_builder:here"
    )
    assert sys.modules["tests.models.keras.networks"] is module


def here(schema, dim):
    return here


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("no_such_module:build", r"'no_such_module' cannot be imported \(No module.*set model.folder"),
        ("tests.models.keras.networks:nothing", "has no function 'nothing'"),
    ],
)
def test_a_builder_that_is_not_there_is_named(builder, message):
    with pytest.raises(InputError, match=message):
        made(builder)


def test_a_module_that_the_folder_has_not_is_none_that_is_found_elsewhere(tmp_path):
    with pytest.raises(InputError, match=rf"no module 'tests' in {tmp_path}; set model\.folder"):
        made("tests.models.keras.networks:mlp", tmp_path)


@pytest.mark.parametrize("name", ["numpy", "colorsys"])
def test_a_module_with_the_name_of_another_one_is_refused(tmp_path, name):
    folder = folder_of(tmp_path, **{name: "build = lambda *_: 1"})

    with pytest.raises(InputError, match=rf"module '{name}' of .* has the name of another one .*; rename it"):
        made(f"{name}:build", folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def build(:", r"'my_mistake' cannot be imported \(SyntaxError: .*line 1\)\); mend it"),
        ("{}['color']", r"'my_mistake' cannot be imported \(KeyError: 'color'\); mend it"),
        ("import no_such_module", r"'my_mistake' cannot be imported \(No module .*\); install what it needs"),
        ("def build(*_): {}['color']", "my_mistake:build failed: KeyError: 'color'"),
        ("def build(*_): None.units", "my_mistake:build failed: AttributeError: 'NoneType'"),
        ("def build(*_): raise RuntimeError('two\\nlines')", "failed: RuntimeError: two lines"),
        ("def build(*_): import no_such_module", "my_mistake:build failed: No module named 'no_such_module'"),
        ("def build(*_): assert False", "my_mistake:build failed: AssertionError"),
        (
            "def build(schema, dim, *, width, depth=2): pass",
            r"takes schema, dim, width, depth \(or its default\) .*: missing a required argument: 'width'",
        ),
        ("def build(): pass", "takes no arguments and is called with the schema, the dim"),
    ],
)
def test_mistakes_of_a_builder_are_said_in_a_sentence(tmp_path, source, message):
    folder = folder_of(tmp_path, my_mistake=source)

    with pytest.raises(InputError, match=message) as raised:
        made("my_mistake:build", folder)

    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None


def test_an_argument_that_nobody_takes_is_named(tmp_path):
    folder = folder_of(tmp_path, my_exact="def build(schema, dim, width=2): return width")

    assert made("my_exact:build", folder, width=3) == 3
    with pytest.raises(
        InputError, match=r"\(widht\): got an unexpected keyword argument 'widht'; change one"
    ):
        made("my_exact:build", folder, widht=3)


def test_a_refusal_of_the_builder_itself_stays_as_it_is(tmp_path):
    source = "from rayrec.platform.errors import InputError\ndef build(*_): raise InputError('no lists here')"

    with pytest.raises(InputError, match=r"^no lists here$"):
        made("my_refusal:build", folder_of(tmp_path, my_refusal=source))

"""The ways that ARCHITECTURE names: every function is there, and is reached from one above it in the list."""

import ast
import functools
import re
from pathlib import Path

import pytest

import rayrec

CHECKOUT = Path(rayrec.__file__).parents[1]
WAYS = ("One batch", "One request", "One RL step")
LONGEST_WAY_TO_THE_INNER_LOOP = 5


def way(title: str) -> list[tuple[str, str]]:
    """(file, function) of a list."""
    text = (CHECKOUT / "ARCHITECTURE.md").read_text()
    found = re.search(rf"### {title}\n.*?```text\n(.*?)```", text, re.DOTALL)
    assert found, f"ARCHITECTURE.md has no list of {title!r}"
    pairs = [line.split(":") for line in found[1].split("\n") if line.strip()]
    return [(file.strip(), function.strip()) for file, function in pairs]


@functools.cache
def definitions(file: str) -> dict[str, ast.AST]:
    """Functions of a file and methods of its classes, by qualified name."""
    found: dict[str, ast.AST] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[prefix + child.name] = child
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((CHECKOUT / file).read_text()), "")
    return found


def names_in(node: ast.AST) -> set[str]:
    """What a function calls or hands on."""
    attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return attributes | {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


@pytest.mark.parametrize("title", WAYS)
def test_the_functions_of_a_way_call_each_other(title):
    steps = way(title)

    assert len(steps) > 3
    for file, function in steps:
        assert function in definitions(file), f"{file} has no {function}"
    for number, (file, function) in enumerate(steps[1:], start=1):
        name = function.split(".")[-1]
        callers = [definitions(above)[caller] for above, caller in steps[:number]]
        assert any(name in names_in(caller) for caller in callers), f"nothing above calls {file}:{function}"


def test_the_inner_loop_is_few_functions_from_the_command():
    functions = [function for _, function in way("One batch")]

    assert functions[0] == "train_command"
    assert functions.index("TrainingPipeline.run") < LONGEST_WAY_TO_THE_INNER_LOOP

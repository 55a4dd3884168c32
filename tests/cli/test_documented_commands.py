"""Commands that the documentation names exist, with the options that it gives them."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import rayrec
from benchmarks import BENCHES
from rayrec.cli import app

CHECKOUT = Path(rayrec.__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "docs/**/*.yaml", "configs/**/*.yaml")
    for path in CHECKOUT.glob(pattern)
    if path.name != "CHANGELOG.md"  # which also names what there was
)
RAYREC: Any = typer.main.get_command(app)


def code(text: str) -> Iterator[str]:
    """Lines of blocks and comments, and spans; what a backslash continues is one line."""
    text = text.replace("\\\n", " ")
    fence = re.compile(r"^ *```.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    for block in fence.findall(text):
        yield from block.splitlines()
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", fence.sub("", text)))
    yield from re.findall(r"^# +(.*)", text, re.MULTILINE)


def calls(program: str) -> Iterator[tuple[str, list[str]]]:
    """Page and arguments of every call of a program."""
    for page in PAGES:
        for line in code(page.read_text()):
            for part in re.split(r"[;|&>]| #", line):
                if found := re.match(rf"\s*(?:[A-Z_]+=\S+ )*(?:\S*/)?{program} +(.*)", part):
                    yield str(page.relative_to(CHECKOUT)), found[1].split()


def missing(words: list[str]) -> list[str]:
    """Commands, benchmarks and options that a call of `rayrec` names and that do not exist."""
    command = RAYREC
    words, inner = list(words), list[str]()
    if "--" in words:  # what follows is the command that `submit` queues
        words, inner = words[: words.index("--")], words[words.index("--") + 1 :]
    while hasattr(command, "commands") and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        name = words.pop(0)
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    named = [re.match(r"--[a-z-]+", word) for word in words]
    found = [option[0] for option in named if option and option[0] not in known]
    if command.name == "bench":
        found += [word for word in words[:1] if re.fullmatch(r"[a-z-]+", word) and word not in BENCHES]
    return found + (missing(inner) if inner and inner[0] in RAYREC.commands else [])


def test_commands_options_and_benchmarks_exist():
    found = [(page, missing(words), " ".join(words)) for page, words in calls("rayrec")]

    assert len(found) > 200
    assert [each for each in found if each[1]] == []


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    named = [(page, words[0]) for page, words in calls("make") if re.fullmatch(r"[a-z-]+", words[0])]

    assert len(named) > 10
    assert [each for each in named if each[1] not in targets] == []


def test_modules_to_run_exist():
    modules = [(page, words[1]) for page, words in calls("python3?") if words[0] == "-m"]

    assert len(modules) > 3
    assert [each for each in modules if importlib.util.find_spec(each[1]) is None] == []


def test_no_help_loses_a_default_in_brackets_to_markup():
    """Rich takes `[stop]` for markup, and shows nothing of it."""

    def helps(command: Any) -> Iterator[tuple[str, str]]:
        for parameter in command.params:
            yield command.name, getattr(parameter, "help", None) or ""
        for below in getattr(command, "commands", {}).values():
            yield from helps(below)

    texts = list(helps(RAYREC))
    assert len(texts) > 100
    assert [(name, text) for name, text in texts if re.search(r"(?<!\\)\[[a-z]", text)] == []

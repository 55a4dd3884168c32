"""Rewards that users write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.functions import import_function
from tests.rl.rewards.rl_lists import lists_of

EVEN = "def even(lists):\n    return (lists.items_UG % 2 == 0) * BONUS\n"


@pytest.fixture(autouse=True)
def _modules_as_before():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("rl_own_"):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


def test_a_function_of_a_folder_gets_the_lists_and_finds_its_neighbors(tmp_path):
    write(tmp_path, "rl_own_bonus", "BONUS = 0.5\n")
    write(tmp_path, "rl_own_rewards", "from rl_own_bonus import BONUS\n" + EVEN)
    path = list(sys.path)

    even = import_function("the reward", "rl_own_rewards:even", tmp_path)

    assert even(lists_of([[4, 3]])).tolist() == [[0.5, 0]]
    assert sys.path == path


def test_a_function_of_an_installed_module_needs_no_folder():
    lists = lists_of([[4, 3]])

    assert import_function("the reward", "tests.rl.rewards.rl_lists:Told")(lists).reward is lists  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rl_own_missing:even", "its module cannot be imported from .*: ModuleNotFoundError"),
        ("rl_own_broken:even", "cannot be imported from .*: ZeroDivisionError: division by zero"),
        ("rl_own_rewards:odd", "the module 'rl_own_rewards' has no function 'odd'"),
        ("rl_own_rewards:BONUS", "has no function 'BONUS'"),
        ("json:loads", r"'json' is a module of .*json/__init__\.py, not of .*; rename"),
        ("sys:exit", "'sys' is a module of Python itself, not of"),
    ],
)
def test_what_is_not_there_is_refused_by_name(tmp_path, function, message):
    write(tmp_path, "rl_own_rewards", "BONUS = 1\n" + EVEN)
    write(tmp_path, "rl_own_broken", "1 / 0\n")

    with pytest.raises(InputError, match=f"the reward {function}: .*{message}"):
        import_function("the reward", function, tmp_path)


def test_of_two_folders_with_one_name_the_second_is_refused(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "rl_own_rewards", "BONUS = 1\n" + EVEN)
    import_function("the reward", "rl_own_rewards:even", tmp_path / "one")

    with pytest.raises(InputError, match=r"is a module of .*one.*, not of .*two"):
        import_function("the reward", "rl_own_rewards:even", tmp_path / "two")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        import_function("the reward", "rl_own_rewards:even", tmp_path / "nowhere")

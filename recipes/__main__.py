"""Run a recipe from data to figures:  python -m recipes NAME [--small] [--out FOLDER]

Data, runs and figures go into a folder of their own; what an earlier run left there is replaced. `--small`
is a run of seconds, whose figures say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rayrec.platform.console import log
from rayrec.platform.errors import InputError

MADE_BY = ".made-by"
"""File that marks folders of recipes."""
RECIPES = ("addresses", "routing", "tags", "nearline")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes", description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--small", action="store_true", help="a run of a minute, to see that it works")
    parser.add_argument("--out", type=Path, help="folder to write; default: runs/recipes/NAME")
    given = parser.parse_args(arguments)
    folder = given.out or Path("runs") / "recipes" / given.name
    began = time.monotonic()
    try:
        _make_anew(folder)
        importlib.import_module(f"recipes.{given.name}.steps").run(folder, given.small)
    except InputError as error:
        log.print(f"recipes: {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        log.print("recipes: interrupted", highlight=False)
        return 130
    log.print(f"{folder}: {time.monotonic() - began:.0f} s in all", highlight=False)
    return 0


def _make_anew(folder: Path) -> None:
    """Empty what a recipe has written; of anything else nothing is removed."""
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MADE_BY).is_file()):
            raise InputError(f"{folder}: holds what no recipe has written; give another folder by --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MADE_BY).write_text("python -m recipes\n")


if __name__ == "__main__":
    sys.exit(main())

"""Run a recipe from data to figures:  python -m recipes NAME [--small] [--out FOLDER]

Data, runs and figures go into a folder of their own; what is there is made anew. `--small` is a run of
seconds, whose figures say nothing.
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

RECIPES = ("addresses", "routing", "tags", "nearline")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes", description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--small", action="store_true", help="a run of seconds, to see that it works")
    parser.add_argument("--out", type=Path, help="folder to write; default: runs/recipes/NAME")
    given = parser.parse_args(arguments)
    folder = given.out or Path("runs") / "recipes" / given.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        importlib.import_module(f"recipes.{given.name}.steps").run(folder, given.small)
    except InputError as error:
        log.print(f"recipes: {error}", highlight=False)
        return 1
    log.print(f"{folder}: {time.monotonic() - began:.0f} s in all", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

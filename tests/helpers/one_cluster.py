"""Which process of xdist runs which files: all that use Ray in the same one, so that there is one cluster.

Three clusters that start at once and stay are a third of what `make test` would have to do.

Not by xdist's groups: with pytest 9.2, pytest-xdist 3.8 does not find them.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

_USES = re.compile(r"ray_cluster|mark\.ray\b|^@on_ray", re.MULTILINE)
_SLOW = re.compile(r"^(@pytest\.mark\.slow$|pytestmark = .*slow)", re.MULTILINE)
_OF_ALL = re.compile(r"^pytestmark = .*$", re.MULTILINE)


class FilesOfOneCluster(LoadFileScheduling):
    """Gives a process whole files, and one of them all files with fast tests that use Ray."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "Ray" if has_fast_tests_on_ray(self.config.rootpath / file) else file


@functools.cache
def has_fast_tests_on_ray(file: Path) -> bool:
    """Read from its text: the process that divides the files collects no tests."""
    text = file.read_text(encoding="utf-8")
    of_all = "".join(_OF_ALL.findall(text))
    functions = [f"{of_all}\n{block}" for block in text.split("\n\n\n") if "def " in block]
    return any(_USES.search(block) is not None and _SLOW.search(block) is None for block in functions)

"""Limits of the control groups that this process is in: of a container, a service, a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
"""Lines of `number:controllers:path`; version 2 of control groups has no controllers there."""
ROOT = Path("/sys/fs/cgroup")


def limits(controller: str, files: tuple[str, ...], files_1: tuple[str, ...]) -> Iterator[list[str]]:
    """Words of the files of each group, from the root on: a group cannot have more than those around it.

    Args:
        controller: `cpu` or `memory`.
        files: of version 2.
        files_1: of version 1, which has a tree of groups for each controller.
    """
    for root, name, names in ((ROOT, "", files), (ROOT / controller, controller, files_1)):
        for folder in _with_parents(root, name):
            yield [word for file in names for line in _lines(folder / file) for word in line.split()]


def _with_parents(root: Path, controller: str) -> list[Path]:
    """Folders of the groups.

    In a container the path may be the host's, which is not there; the root is the container's group then.
    """
    folders = [root]
    for line in _lines(OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = Path(path.strip("/"))
            folders += [root / each for each in (own, *own.parents)]
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # there is no such group, or no such system
        return []

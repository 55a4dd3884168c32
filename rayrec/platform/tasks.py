"""Work that is done in tasks, anywhere and in any order: each takes a number and returns what is pickled."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

Task = Callable[[Any, Any], Any]
"""(what all tasks of a stage share, what this one is about) -> its result; a function of a module."""


class RunTasks(Protocol):
    """Run a task for each of some arguments; yield (index of the argument, result) as they are done.

    The first exception of a task ends the others and is raised as it was. Closing the generator ends those
    that run.
    """

    def __call__(self, task: Task, shared: Any, arguments: Sequence[Any]) -> Generator[tuple[int, Any]]: ...


def run_tasks_locally(task: Task, shared: Any, arguments: Sequence[Any]) -> Generator[tuple[int, Any]]:
    """`RunTasks` in this process, one task after the other."""
    for index, argument in enumerate(arguments):
        yield index, task(shared, argument)

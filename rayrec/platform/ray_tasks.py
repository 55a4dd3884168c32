"""`RunTasks` on the cluster."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, ParamSpec, TypeVar

import ray

from rayrec.platform.ray_errors import root_cause
from rayrec.platform.tasks import Task

P = ParamSpec("P")
R = TypeVar("R")
_AHEAD = 2
"""Tasks that are submitted for each CPU: one runs, one waits for it to be free."""


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose task `ray.cancel` ends, however the cluster was started.

    Ray interrupts a task as Ctrl-C would, and the processes of a cluster that was started in the background
    of a shell (`nohup rayrec tune ... &`) ignore that.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        is_main = threading.current_thread() is threading.main_thread()  # others set no handlers
        if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return function(*arguments, **named)

    return run


def run_tasks_on_ray(task: Task, shared: Any, arguments: Sequence[Any]) -> Generator[tuple[int, Any]]:
    """`RunTasks` with one task per CPU; needs `ray.init`.

    A task whose process dies is repeated by Ray: tasks write under other names until they are done.
    """
    remote = ray.remote(num_cpus=1, max_retries=3)(interruptible(task))
    reference = ray.put(shared)
    waiting = list(enumerate(arguments))[::-1]
    running: dict[Any, int] = {}
    most = max(int(_AHEAD * ray.cluster_resources().get("CPU", 1)), 1)
    try:
        while waiting or running:
            while waiting and len(running) < most:
                index, argument = waiting.pop()
                running[remote.remote(reference, argument)] = index
            (done, *_), _ = ray.wait(list(running))
            index = running.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise root_cause(error) from error
            yield index, result
    finally:
        for left in running:
            ray.cancel(left)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=60)

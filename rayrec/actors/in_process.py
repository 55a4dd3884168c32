"""Actors without a cluster: objects of this process, whose methods are called directly.

    handle.train.remote(batch) ─► the method runs now, in the caller's thread ─► a promise already kept

So a debugger steps from the driver's loop into any actor. Trainers that wait for each other have threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from rayrec.actors.collective import Meeting
from rayrec.actors.spawning import ActorRole


class InProcessActor:
    """The handle of an actor; stands where Ray's `ActorHandle` does."""

    def __init__(self, instance: Any, thread: ThreadPoolExecutor | None) -> None:
        self.instance = instance
        self._thread = thread

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.instance, name), self._thread)


class _Method:
    def __init__(
        self, method: Callable[..., Any], thread: ThreadPoolExecutor | None, num_returns: int = 1
    ) -> None:
        self._method = method
        self._thread = thread
        self._num_returns = num_returns

    def options(self, num_returns: int = 1) -> _Method:
        return _Method(self._method, self._thread, num_returns)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """The promise of the answer, or so many promises as `num_returns` says of a tuple's items."""
        promises: list[Future[Any]] = [Future() for _ in range(self._num_returns)]
        if self._thread is None:
            self._keep(promises, arguments, named)
        else:
            self._thread.submit(self._keep, promises, arguments, named)
        return promises if len(promises) > 1 else promises[0]

    def _keep(
        self, promises: Sequence[Future[Any]], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        try:
            answer = self._call(arguments, named)
            parts = list(answer) if len(promises) > 1 else [answer]
            assert len(parts) == len(promises), "the caller says how many there are"
        except Exception as error:
            for promise in promises:
                promise.set_exception(error)
        else:
            for promise, part in zip(promises, parts, strict=True):
                promise.set_result(part)

    def _call(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        kept = [value.result() if isinstance(value, Future) else value for value in arguments]
        return self._method(*kept, **named)


class InProcessHost:
    """Starts actors in this process; `close` ends their threads."""

    def __init__(self, run: str, threads_of: Mapping[str, int] | None = None) -> None:
        """
        Args:
            threads_of: stages whose members wait for each other, and how many members they have.
        """
        self._run = run
        self._meetings = {stage: Meeting(members) for stage, members in (threads_of or {}).items()}
        self._threads: list[ThreadPoolExecutor] = []

    def spawn(
        self,
        cls: type,
        stage: str,
        member: int,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        restarts: int | None = None,
    ) -> InProcessActor:
        role, thread = ActorRole(self._run, stage, member), None
        if stage in self._meetings:
            thread = ThreadPoolExecutor(1, role.actor_name)
            self._threads.append(thread)
        return InProcessActor(cls(role, *arguments), thread)

    def put(self, value: Any) -> Any:
        return value

    def meeting(self, stage: str) -> Meeting | None:
        return self._meetings.get(stage)

    def close(self) -> None:
        # Those that wait for one that failed are let go first.
        for meeting in self._meetings.values():
            meeting.abort()
        for thread in self._threads:
            thread.shutdown()


class InProcessCalls:
    """Waits for promises of actors in this process."""

    def wait(self, promises: Sequence[Future[Any]], may_take_long: bool = False) -> list[Future[Any]]:
        """One or more of those that are kept."""
        done, _ = wait(promises, return_when=FIRST_COMPLETED)
        return [promise for promise in promises if promise in done]

    def get(self, promises: Sequence[Future[Any]], may_take_long: bool = False) -> list[Any]:
        """What was promised; the first error ends the wait for the others."""
        done, _ = wait(promises, return_when=FIRST_EXCEPTION)
        failed = [promise for promise in promises if promise in done and promise.exception() is not None]
        # A member that another one's failure has freed says so; the failure itself says why.
        failed.sort(key=lambda promise: isinstance(promise.exception(), threading.BrokenBarrierError))
        return [promise.result() for promise in failed or promises]

"""Actors without a cluster: objects of this process, whose methods are called directly.

    handle.train.remote(batch) ─► the method runs now, in the caller's thread ─► a promise already kept

So a debugger steps from the driver's loop into any actor. Trainers that wait for each other have threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, cast, runtime_checkable

from rayrec.actors.collective import Meeting
from rayrec.actors.spawning import ActorRole


class ReleasedError(RuntimeError):
    """A call that was let go because an actor of the same run has failed; that one's error says why."""


class InProcessActor:
    """The handle of an actor; stands where Ray's `ActorHandle` does."""

    def __init__(self, instance: Any, host: InProcessHost, thread: ThreadPoolExecutor | None) -> None:
        self.instance = instance
        self._host = host
        self._thread = thread

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.instance, name), self._host, self._thread)


class _Method:
    def __init__(
        self,
        method: Callable[..., Any],
        host: InProcessHost,
        thread: ThreadPoolExecutor | None,
        num_returns: int = 1,
    ) -> None:
        self._method = method
        self._host = host
        self._thread = thread
        self._num_returns = num_returns

    def options(self, num_returns: int = 1) -> _Method:
        return _Method(self._method, self._host, self._thread, num_returns)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """The promise of the answer, or so many promises as `num_returns` says of a tuple's items."""
        promises: list[Future[Any]] = [Future() for _ in range(self._num_returns)]
        if self._thread is None:
            self._keep(promises, arguments, named)
        else:
            self._thread.submit(self._keep_in_thread, promises, arguments, named)
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

    def _keep_in_thread(
        self, promises: Sequence[Future[Any]], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        error: BaseException
        if self._host.has_failed:  # this call may wait for what will never come
            error = ReleasedError("another actor of this run has failed")
        else:
            try:
                self._keep(promises, arguments, named)
                if promises[0].exception() is None:
                    return
                error = cast(BaseException, promises[0].exception())
            except BaseException as stop:  # nobody but the promise hears of it: SystemExit, too
                error = stop
        # First the reason, then those that are let go by it: the driver is to see the reason.
        for promise in promises:
            if not promise.done():
                promise.set_exception(error)
        self._host.fail(error)

    def _call(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return self._method(*map(_kept, arguments), **{name: _kept(value) for name, value in named.items()})


def _kept(value: Any) -> Any:
    return value.result() if isinstance(value, Future) else value


@runtime_checkable
class _HasWaiters(Protocol):
    """An actor in which calls of others wait."""

    def abort(self, error: BaseException) -> None:
        """Let them go with an error."""


@runtime_checkable
class _HasThreads(Protocol):
    """An actor whose threads do not end with a process of its own."""

    def close(self) -> None:
        """End them."""


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
        self._with_waiters: list[_HasWaiters] = []
        self._with_threads: list[_HasThreads] = []
        self.has_failed = False
        """Whether an actor with a thread has failed: others may wait for it, in a meeting or in a server."""

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
        instance = cls(role, *arguments)
        if isinstance(instance, _HasWaiters):
            self._with_waiters.append(instance)
        if isinstance(instance, _HasThreads):
            self._with_threads.append(instance)
        return InProcessActor(instance, self, thread)

    def fail(self, error: BaseException) -> None:
        """Let all go that wait for an actor that has failed."""
        if not self.has_failed:
            self.has_failed = True
            for meeting in self._meetings.values():
                meeting.abort()
            for actor in self._with_waiters:
                actor.abort(error)

    def put(self, value: Any) -> Any:
        return value

    def meeting(self, stage: str) -> Meeting | None:
        return self._meetings.get(stage)

    def close(self) -> None:
        self.fail(ReleasedError("the run has ended"))
        for thread in self._threads:
            thread.shutdown()
        for actor in self._with_threads:
            actor.close()


_LET_GO = (threading.BrokenBarrierError, ReleasedError)


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
        # Those that a failure has let go say so; the failure itself says why.
        failed.sort(key=lambda promise: isinstance(promise.exception(), _LET_GO))
        return [promise.result() for promise in failed or promises]

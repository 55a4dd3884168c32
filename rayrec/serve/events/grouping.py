"""Requests of several threads that share one expensive step, such as the commit of a transaction.

The first thread that finds nobody at work takes all that wait, its own request among them, and works for all
of them; who comes meanwhile waits for the next turn. So a lone request waits for nobody, and under load a
commit serves as many requests as came during the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass
class _Waiting(Generic[Request, Result]):
    request: Request
    is_done: threading.Event = field(default_factory=threading.Event)
    result: Result | None = None
    error: BaseException | None = None
    leads: bool = False


class Grouped(Generic[Request, Result]):
    """A function of many requests, called by many threads with one each."""

    def __init__(self, work: Callable[[Sequence[Request]], Sequence[Result]], most: int = 256) -> None:
        """
        Args:
            work: gives a result for each request; where it raises, every request of its group fails.
            most: requests of a group.
        """
        self._work, self._most = work, most
        self._lock = threading.Lock()
        self._waiting: list[_Waiting[Request, Result]] = []
        self._is_busy = False

    def __call__(self, request: Request) -> Result:
        """The result of this request; what `work` raises is raised here."""
        own: _Waiting[Request, Result] = _Waiting(request)
        with self._lock:
            self._waiting.append(own)
            if not self._is_busy:
                self._is_busy = own.leads = True
        if not own.leads:
            own.is_done.wait()
        if own.leads:
            self._lead()
        if own.error is not None:
            raise own.error
        return own.result  # type: ignore[return-value]

    def _lead(self) -> None:
        """Work for a group, in which this thread's request is the first, and hand over to who came since."""
        with self._lock:
            group, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        try:
            results = self._work([one.request for one in group])
            for one, result in zip(group, results, strict=True):
                one.result = result
        except BaseException as error:
            for one in group:
                one.error = error
        with self._lock:
            self._is_busy = bool(self._waiting)
            if self._waiting:
                self._waiting[0].leads = True
                self._waiting[0].is_done.set()
        for one in group:
            one.is_done.set()

"""The processes of an RL run as objects of the test's process: calls run at once, in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rayrec.actors.rl_worker import RayProcesses, RlProcess
from rayrec.actors.spawning import ActorRole


class InProcess(RayProcesses):
    """Stands where `RayProcesses` does. Promises are values."""

    def __init__(self) -> None:
        super().__init__("run")

    def spawn(
        self, cls: type[RlProcess], stage: str, num_workers: int, arguments: Sequence[Any], **settings: Any
    ) -> list[Any]:
        assert num_workers == 1 or settings["restarts"] is not None, "learners of one process cannot meet"
        return [
            _Handle(cls(ActorRole("run", stage, member), *arguments, num_workers, settings["threads"], False))
            for member in range(num_workers)
        ]

    def get(self, promises: Sequence[Any]) -> list[Any]:
        return list(promises)

    def put(self, value: Any) -> Any:
        return value


class _Handle:
    def __init__(self, worker: RlProcess) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> _Call:
        return _Call(getattr(self._worker, name))


class _Call:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method

    def options(self, num_returns: int) -> _Call:
        return self

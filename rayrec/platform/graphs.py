"""Recorded work of a device: kernels that were started one by one are started again all at once.

    capture(work) ─► warm-up ─► work() is recorded, and runs no more ─► replay: one call, no Python between

A small step of a large network takes longer to start than to compute. A recording repeats exactly what was
done: the same kernels, on the same memory. So work takes what it reads from tensors that stay, writes what
comes of it to tensors that stay, looks at no value and waits for nothing (`devices.fixed_shapes`).

`DeviceGraphs` has CUDA's graphs and, by the same calls, those of an NPU. Other recorders (`Graphs`) are for
tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from rayrec.platform.devices import device_of

if TYPE_CHECKING:
    import torch

WARM_UPS = 3
"""Runs before the recording, in which libraries load kernels and take their workspaces."""

Work = Callable[[], None]


class CaptureFailedError(RuntimeError):
    """Work was not recorded; says what it did first that cannot be."""


class Graphs(Protocol):
    """What records."""

    def capture(self, work: Work) -> Work:
        """Record work, and return what repeats it.

        Raises:
            Exception: it does what cannot be recorded; nothing more should be recorded then.
        """
        ...


class DeviceGraphs:
    """Recordings that share memory: what one needs while it runs, the next one uses too.

    They are replayed one after the other, on one stream. Results stay until the same recording is replayed.
    Safe to call from several threads.
    """

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: has a `graph_class`.
        """
        import torch

        kind = device_of(device)
        assert kind.graph_class is not None, "asked before, see `graphs_of`"
        self._module: Any = torch.get_device_module(device)
        self._graph_class = getattr(self._module, kind.graph_class)
        self._options = kind.graph_options
        self._stream = self._module.Stream(device)
        self._pool: Any = None
        self._lock = threading.Lock()

    def capture(self, work: Work) -> Work:
        """Record work, and return what repeats it.

        Raises:
            CaptureFailedError: it cannot be recorded. The memory that recordings share may be in use by what
                was recorded of it, so nothing more is.
        """
        module = self._module
        with self._lock:
            self._stream.wait_stream(module.current_stream())
            with module.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
            module.synchronize()
            graph = self._graph_class()
            self._record(graph, work)
            self._pool = graph.pool()

        def replay() -> None:
            with self._lock:
                self._stream.wait_stream(module.current_stream())
                with module.stream(self._stream):
                    graph.replay()
                module.current_stream().wait_stream(self._stream)

        return replay

    def _record(self, graph: Any, work: Work) -> None:
        module, first = self._module, list[Exception]()
        stream = module.current_stream()
        try:
            with module.graph(graph, pool=self._pool, stream=self._stream, **self._options):
                try:
                    work()
                except Exception as error:
                    first.append(error)
                    raise
        except Exception as error:
            # The end of the recording has failed as well, with an error of its own, and left its stream.
            module.set_stream(stream)
            original = first[0] if first else error
            raise CaptureFailedError(f"{type(original).__name__}: {original}") from original


def graphs_of(device: torch.device) -> Graphs | None:
    """What records work of a device; None where nothing does."""
    return None if device_of(device).graph_class is None else DeviceGraphs(device)

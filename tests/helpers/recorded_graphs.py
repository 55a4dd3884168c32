"""A stand-in for a device's graphs: on the CPU it records operations, and repeats them and nothing else.

As on a device, a replay runs no Python of what was recorded, works on the tensors that were there then, and
whatever was decided while it was recorded stays so. What a graph could not record raises: a value that is
read, a number of elements that depends on values, an array that is copied from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READ_VALUES = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave.Tensor",
}
"""Operations for which a device is waited for."""


class NotRecordableError(RuntimeError):
    """What no graph could repeat."""


@dataclass
class _Operation:
    run: Callable[[], Any]
    results: list[Tensor]
    is_in_place: bool


@dataclass
class Recording:
    """The operations of one capture."""

    operations: list[_Operation] = field(default_factory=list)
    num_replays: int = 0

    def replay(self) -> None:
        """Run all operations again, into the memory that their results had."""
        self.num_replays += 1
        for operation in self.operations:
            found = tree_leaves(operation.run())
            if operation.is_in_place:
                continue
            tensors = [each for each in found if isinstance(each, Tensor)]
            for result, new in zip(operation.results, tensors, strict=True):
                assert result.shape == new.shape, "a new shape"
                assert result.stride() == new.stride(), "a new layout"
                result.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in READ_VALUES or f"{name}.{func._overloadname}" in READ_VALUES:
            raise NotRecordableError(f"{func} reads values")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name in ("index", "index_put", "index_put_") and any(
            each.dtype == torch.bool for each in given[1:]
        ):
            raise NotRecordableError(f"{func} by truth values has a size that depends on them")
        found = func(*args, **kwargs)
        results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        is_in_place = func._schema.is_mutable
        owned = {each.untyped_storage().data_ptr() for each in given}
        is_view = all(each.untyped_storage().data_ptr() in owned for each in results)
        if is_in_place or not is_view:
            operation = _Operation(lambda: func(*args, **kwargs), results, is_in_place)
            self._recording.operations.append(operation)
        return found


class RecordingGraphs:
    """Instead of `rayrec.platform.graphs.DeviceGraphs`."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # the warm-up makes what is made once
        recording = Recording()
        with _Recorder(recording), _no_copies_from_the_host():
            work()
        self.recordings.append(recording)
        return recording.replay


@contextmanager
def _no_copies_from_the_host() -> Iterator[None]:
    """And none to it: on a CPU, these would pass by the recorder."""

    def refuse(*args: Any, **more: Any) -> Any:
        raise NotRecordableError("values are copied from the host")

    def reads(*args: Any, **more: Any) -> Any:
        raise NotRecordableError("reads values: they are copied to the host")

    to = Tensor.to

    def moves(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
        # By name alone: the device itself is a CPU here.
        return reads() if "cpu" in (*args, more.get("device")) else to(tensor, *args, **more)

    with ExitStack() as stack:
        for name in ("from_numpy", "tensor", "as_tensor", "asarray"):
            stack.enter_context(mock.patch.object(torch, name, refuse))
        stack.enter_context(mock.patch.object(Tensor, "new_tensor", refuse))
        for name in ("tolist", "numpy", "cpu"):
            stack.enter_context(mock.patch.object(Tensor, name, reads))
        stack.enter_context(mock.patch.object(Tensor, "to", moves))
        yield


class Counting(TorchDispatchMode):
    """Names of the operations that run, outside of replays."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

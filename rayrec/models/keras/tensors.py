"""Tensors of PyTorch as TensorFlow's and back, in the same memory (DLPack).

TensorFlow's kernels take it for granted that a tensor begins at a multiple of 64 bytes, and end the process
where one does not. PyTorch allocates at such places; NumPy does not, nor does a tensor begin there that is a
part of another one. Those are copied.

Of tensors in the host's memory, which are there when the call returns: nothing waits for an accelerator's
streams here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes."""


def to_tensorflow(tensorflow: Any, tensor: Tensor) -> Any:
    """The same numbers; the same memory, where it is contiguous and aligned.

    Neither side may write to it while the other reads. TensorFlow does not: it reuses the memory of tensors
    that nobody else holds, so the caller has to hold what this returns until it is done.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensorflow.experimental.dlpack.from_dlpack(tensor.__dlpack__())


def to_torch(tensor: Any) -> Tensor:
    """The same memory. To be read, not written: TensorFlow may have it in use elsewhere."""
    return torch.from_dlpack(tensor)

"""A device named `npu` made of Python: tensors that hold CPU tensors, and operations that are named here.

    python -m pytest -p tests.helpers.simulated_npu -k npu FILES

registers it, for that process and for good; so whoever tests on it has a process of their own
(`tests/devices/test_simulated_npu.py`). From then on `get_device("npu")` finds it as it finds an Ascend NPU,
through `torch.npu`, and tests that are parametrized by the devices that are here run on it.

It proves that nothing in our code assumes CUDA or CPU: an operation that is not on the list is refused, and
so is one of an NPU's tensor with a CPU's, but for the single numbers that torch takes along with pointwise
operations. It proves nothing of torch_npu's operators: what they round to, which types they take, what they
lack.

How it is built: PyTorch keeps the dispatch key PrivateUse1 for devices from outside.
`_setup_privateuseone_for_python_backend` renames it and registers what PyTorch expects of a device (module,
guard, hooks), so that autograd, with a thread of its own for the device, works as for any other. Tensors are
wrapper subclasses (`__torch_dispatch__`): kernels of `torch.library` alone would see contiguous strides
whatever they are, and not recognize the copies of tensors that autograd saves. Such kernels are there for
what is called without a tensor of the device, or below `__torch_dispatch__` (making tensors, and the copy
inside `torch.tensor`), and for autocast, for which PyTorch registers nothing under this key.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npu"
TOTAL_MEMORY = 64 * 2**30
aten = torch.ops.aten
KNOWN = set(
    """
    __rshift__ _embedding_bag _embedding_bag_backward _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward _foreach_add _foreach_add_ _foreach_addcdiv_
    _foreach_addcmul_ _foreach_copy_ _foreach_div_ _foreach_lerp_ _foreach_mul_ _foreach_sqrt
    _local_scalar_dense _log_softmax _log_softmax_backward_data _prelu_kernel _prelu_kernel_backward
    _safe_softmax _softmax _softmax_backward_data _to_copy _unsafe_view abs add add_ addcdiv_ addcmul
    addcmul_ addmm addmm_ alias all amax any binary_cross_entropy_with_logits bitwise_and bitwise_not
    bitwise_or bitwise_or_ bitwise_xor bmm bucketize cat clamp clamp_min clone constant_pad_nd copy_
    cumsum detach detach_ diagonal div div_ embedding embedding_dense_backward empty_like eq equal exp
    exp_ expand fill_ floor_divide gather ge gelu gelu_backward gt index index_add index_copy
    index_copy_ index_put index_put_ index_select isnan le lerp lerp_ lift_fresh linalg_vector_norm log
    log_sigmoid_backward log_sigmoid_forward logical_not logsumexp lt masked_fill masked_fill_ mean
    minimum mm mul mul_ nan_to_num native_layer_norm native_layer_norm_backward ne neg new_empty_strided
    new_full new_zeros nll_loss_backward nll_loss_forward nonzero ones_like permute pow reciprocal relu
    relu_ remainder repeat_interleave scatter scatter_ scatter_add scatter_add_ searchsorted select
    select_backward sigmoid sigmoid_backward silu slice slice_backward sort split split_with_sizes sqrt
    squeeze stack sub sub_ sum t threshold_backward topk transpose triu unbind unsqueeze view where
    zero_ zeros_like
    """.split()  # noqa: SIM905
)
"""Names of the operations of aten that a step of training, ranking or the cache of rows asks a device for.

torch_npu lists kernels for the sums and means of bags and for the gradients of their weights
(op_plugin/config/op_plugin_functions.yaml); whether for the gradients of their rows, too
(`_embedding_bag_backward`), is open.
What it has no kernel for, it computes on the host, with a warning.
"""


class Npu:
    """What `torch.npu` is, as far as our code and PyTorch ask it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        """What was asked of streams, and which of them copied from the host, in order."""
        self._stream = _Stream(self, "default")

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """It has no random numbers of its own."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return "simulated in Python"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=TOTAL_MEMORY)

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        """Everything is done when it is asked for."""

    def current_stream(self, device: Any = None) -> _Stream:
        return self._stream

    def Stream(self, device: Any = None) -> _Stream:
        return _Stream(self, "copies")

    @contextmanager
    def stream(self, stream: _Stream) -> Any:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before


class _Stream:
    def __init__(self, npu: Npu, name: str) -> None:
        self._npu = npu
        self.name = name

    def wait_stream(self, other: _Stream) -> None:
        self._npu.calls.append(f"{self.name} waits for {other.name}")


class _Composites(dict[Any, bool]):
    """Whether an operation is a composition of others, which a device has to know instead."""

    def __missing__(self, func: Any) -> bool:
        key = "CompositeImplicitAutograd"
        self[func] = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
        return self[func]


_COMPOSITES = _Composites()


class NpuTensor(torch.Tensor):
    """A tensor on the device; `held` has its numbers, in the same sizes and strides."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> NpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"npu:{self.held!r}"

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: NpuTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # sizes and type
        self.held = other.held

    def tolist(self) -> Any:
        return self.held.tolist()

    def record_stream(self, stream: _Stream) -> None:
        stream._npu.calls.append(f"recorded on {stream.name}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if _COMPOSITES[func]:  # in inference mode they come undivided
            return func.decompose(*args, **kwargs)
        if func.namespace != "aten" or name not in KNOWN:
            refused = f"the simulated NPU has no operation {func}; see tests/helpers/simulated_npu.py"
            if threading.current_thread() is not threading.main_thread():
                # Autograd's thread loses what is raised in it, and may end the process without a word.
                print(refused, file=sys.stderr, flush=True)
            raise NotImplementedError(refused)
        if func is aten.copy_.default:
            return _copied(*args)
        if name == "_to_copy":
            target = kwargs.pop("device", None)
            copy = func(_held(args[0]), **kwargs)
            return copy if target is not None and target.type != NAME else NpuTensor(copy)
        if func is aten.sqrt.default and args[0].dtype == torch.float32:
            # A device's roots round as IEEE 754 says; those of MKL on the host can be off by a bit.
            return NpuTensor(func(_held(args[0]).double()).float())
        wrapper_of: dict[int, NpuTensor] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, NpuTensor):
                wrapper_of[id(value.held)] = value
                return value.held
            if isinstance(value, torch.Tensor) and not _may_come_along(func, value):
                raise RuntimeError(
                    f"{func}: expected all tensors to be on the same device, but found one of shape "
                    f"{tuple(value.shape)} on {value.device} beside those on {NAME}"
                )
            return torch.device("cpu") if isinstance(value, torch.device) else value

        held_args, held_kwargs = pytree.tree_map(on_host, (args, kwargs))
        result = func(*held_args, **held_kwargs)

        def on_npu(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if (given := wrapper_of.get(id(value))) is not None:  # changed in place, or written to
                assert given.shape == value.shape, (
                    f"{func} gave a tensor another shape, which its wrapper keeps"
                )
                return given
            # In inference mode, a view of what was made outside of it is still no inference tensor.
            with torch.inference_mode(value.is_inference()):
                return NpuTensor(value)

        return pytree.tree_map(on_npu, result)


def _may_come_along(func: Any, value: torch.Tensor) -> bool:
    """Numbers on the host are taken by pointwise operations of every device."""
    return value.ndim == 0 and value.device.type == "cpu" and torch.Tag.pointwise in func.tags


def _held(value: Any) -> Any:
    return value.held if isinstance(value, NpuTensor) else value


def _copied(target: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
    """From any device to any other."""
    if isinstance(target, NpuTensor) and not isinstance(source, NpuTensor):
        NPU.calls.append(f"copied on {NPU.current_stream().name}")
    _held(target).copy_(_held(source))
    return target


def _empty(size: Sequence[int], dtype: Any = None, **_: Any) -> NpuTensor:
    return NpuTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> NpuTensor:
    return NpuTensor(torch.empty_strided(size, stride, dtype=dtype))


def _arange(*bounds: Any, dtype: Any = None, **_: Any) -> NpuTensor:
    return NpuTensor(torch.arange(*bounds, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copied(target, source)


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    head_num: int,
    input_layout: str,
    scale: float,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int,
    atten_mask: torch.Tensor | None = None,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
) -> tuple[torch.Tensor]:
    """What the documentation of torch_npu says of it, for the modes that `models.attention.ascend` uses."""
    assert (input_layout, query.shape[1]) == ("TND", head_num)
    outs, q_start, k_start = [], 0, 0
    for q_stop, k_stop in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
        q_THC, k_SHC, v_SHE = query[q_start:q_stop], key[k_start:k_stop], value[k_start:k_stop]
        scores_HTS = torch.einsum("thc,shc->hts", q_THC, k_SHC) * scale
        # Places are counted from the end of both rows.
        distance_TS = (
            torch.arange(q_stop - q_start)[:, None] + (k_stop - k_start - q_stop + q_start)
        ) - torch.arange(k_stop - k_start)
        if sparse_mode == 3:
            hidden_TS = distance_TS < 0
        elif sparse_mode == 4:
            hidden_TS = (distance_TS < -next_tockens) | (distance_TS > pre_tockens)
        else:
            assert (sparse_mode, atten_mask) == (0, None)
            hidden_TS = torch.zeros_like(distance_TS, dtype=torch.bool)
        scores_HTS = scores_HTS.masked_fill(hidden_TS.to(query.device), -math.inf)
        outs.append(torch.einsum("hts,she->the", torch.softmax(scores_HTS, -1), v_SHE))
        q_start, k_start = q_stop, k_stop
    return (torch.cat(outs),)


NPU = Npu()
_LIBRARIES: list[torch.library.Library] = []
"""Registrations last as long as these."""


def register() -> None:
    """Once in a process; again, it does nothing."""
    if _LIBRARIES:
        return
    _setup_privateuseone_for_python_backend(NAME, NPU)
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("empty.memory_format", _empty, "PrivateUse1")
    kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    for overload in ("arange", "arange.start", "arange.start_step"):
        # PyTorch's own makes an empty tensor and lets it grow.
        kernels.impl(overload, _arange, "PrivateUse1")
    autocast = torch.library.Library("aten", "IMPL")
    for name in LOWER_PRECISION:
        autocast.impl(name, _in_lower_precision(name), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((kernels, autocast, others))
    stand_in: Any = ModuleType("torch_npu")
    stand_in.npu_fusion_attention = npu_fusion_attention
    sys.modules["torch_npu"] = stand_in


LOWER_PRECISION = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention")
"""Operations that autocast gives 16-bit factors, as on other devices."""


def _in_lower_precision(name: str) -> Any:
    operation = getattr(aten, name)

    def shortened(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            return value.to(torch.get_autocast_dtype(NAME))
        return value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outside = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        )
        with outside:
            return operation(*pytree.tree_map(shortened, args), **pytree.tree_map(shortened, kwargs))

    return kernel


register()

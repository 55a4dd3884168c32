"""All that depends on the kind of device: `cuda`, `npu` or `cpu`. Needs torch alone.

No other file names a kind, except `device_diagnosis` (why a device is missing) and `mps` (processes that
share a GPU). Everything that differs between devices is a field of `Device`, so moving a run to another
device changes one line of its config.

Torch is imported where a device is used: the import costs more than a second and 150 MB, which processes that
only name a device, such as feature workers, do not need.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rayrec.platform.device_diagnosis import CUDA_VISIBLE, NPU_VISIBLE, why_no_cuda, why_no_npu
from rayrec.platform.errors import InputError, MachineError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

HOST_COLLECTIVE_BACKEND = "gloo"
"""Backend of `torch.distributed` for arrays in host memory, whatever the device."""


@dataclass(frozen=True)
class Device:
    """Properties of a kind of device."""

    kind: str
    """Name in the config: `cpu`, `cuda` or `npu`."""
    collective_backend: str
    """Backend of `torch.distributed` for tensors on this device."""
    ray_resource: str
    """Key under which Ray counts this device."""
    visibility_variable: str | None
    """Environment variable with the devices that a process may see; Ray sets it for its actors."""
    fused_optimizer: bool
    """Whether torch's fused optimizers exist for this device; otherwise the `foreach` ones are used."""
    has_own_memory: bool
    """Whether data must be copied from the host's memory to the device's."""
    attention_backends: tuple[str, ...]
    """Backends of `rayrec.models.attention` with kernels for it, in order of preference."""
    attention_without_backward: tuple[str, ...] = ()
    """Those without a backward pass."""
    quantized_kernels: tuple[str, ...] = ("float32", "reference")
    """Kernels of `rayrec.models.quantization` for it, in order of preference."""
    autocast_type: str = "bfloat16"
    """Name of the 16-bit type of autocast. All devices have bfloat16, and it needs no loss scaling."""
    profiler: str = "torch.profiler"
    """Module with `profile` and `ProfilerActivity` that see this device's kernels."""
    profiler_activity: str | None = None
    """The profiler's name for this device's activities."""
    graph_class: str | None = None
    """Class of the device's module in torch that records kernels and starts them again all at once, see
    `rayrec.platform.graphs`."""
    graph_options: Mapping[str, Any] = field(default_factory=dict)
    """For what records."""
    has_mps: bool = False
    """Whether processes can share one through NVIDIA's Multi-Process Service, see `rayrec.platform.mps`."""
    has_symmetric_memory: bool = False
    """Whether torch can compute with memory that several of them have in common, see
    `torch.distributed._symmetric_memory`."""

    @property
    def torch(self) -> torch.device:
        import torch

        return torch.device(self.kind)

    @property
    def backend_beside_host(self) -> str:
        """Backends of one process group for tensors on this device and in host memory."""
        if not self.has_own_memory:
            return self.collective_backend
        return f"{HOST.kind}:{HOST_COLLECTIVE_BACKEND},{self.kind}:{self.collective_backend}"


def _cpu_is_there() -> str | None:
    return None


_DEVICES: dict[str, tuple[Device, Callable[[], str | None]]] = {
    "cpu": (
        Device(
            "cpu",
            HOST_COLLECTIVE_BACKEND,
            "CPU",
            visibility_variable=None,
            fused_optimizer=True,
            has_own_memory=False,
            attention_backends=("bucketed", "grouped", "sdpa", "flex", "reference"),
            attention_without_backward=("flex",),
            quantized_kernels=("fbgemm", "float32", "int4_weights", "reference"),
        ),
        _cpu_is_there,
    ),
    "cuda": (
        Device(
            "cuda",
            "nccl",
            "GPU",
            visibility_variable=CUDA_VISIBLE,
            fused_optimizer=True,
            has_own_memory=True,
            attention_backends=("triton", "sdpa", "flex", "reference"),
            quantized_kernels=("torch_int8", "torch_fp8", "float32", "reference"),
            profiler_activity="CUDA",
            graph_class="CUDAGraph",
            # Others may answer meanwhile: what they do on threads of their own is not recorded.
            graph_options={"capture_error_mode": "thread_local"},
            has_mps=True,
            has_symmetric_memory=True,
        ),
        why_no_cuda,
    ),
    "npu": (
        Device(
            "npu",
            "hccl",
            "NPU",
            visibility_variable=NPU_VISIBLE,
            fused_optimizer=False,
            has_own_memory=True,
            attention_backends=("ascend", "sdpa", "reference"),
            quantized_kernels=("ascend_int8", "float32", "reference"),
            profiler="torch_npu.profiler",
            profiler_activity="NPU",
            graph_class="NPUGraph",
        ),
        why_no_npu,
    ),
}
KINDS = tuple(_DEVICES)
ACCELERATOR_RESOURCES = frozenset(
    device.ray_resource for device, _ in _DEVICES.values() if device.has_own_memory
)
"""Keys under which Ray counts accelerators."""
HOST = next(device for device, _ in _DEVICES.values() if not device.has_own_memory)
"""The CPU."""


def why_missing(kind: str) -> str | None:
    """Say in one sentence why a device cannot be used and what to install; None if it can be used."""
    try:
        return _DEVICES[kind][1]()
    except (ImportError, OSError, RuntimeError) as error:
        return f"{kind} cannot be initialized: {error}"


def device_named(kind: str) -> Device:
    """Properties of a kind of device, whether or not this machine has one.

    Raises:
        InputError: an unknown name.
    """
    if kind not in _DEVICES:
        raise InputError(f"device: there is no device {kind!r}; expected one of {', '.join(KINDS)}")
    return _DEVICES[kind][0]


def device_of(device: torch.device) -> Device:
    """Properties of a tensor's device; an unknown one is assumed to run torch's own operations."""
    if device.type in _DEVICES:
        return _DEVICES[device.type][0]
    return Device(device.type, "", "", None, False, True, attention_backends=("sdpa", "reference"))


def hardware_name(device: torch.device) -> str:
    """Model and thread count of a device: the key under which measured times are valid."""
    import torch

    if not device_of(device).has_own_memory:
        return f"{device.type}:{torch.backends.cpu.get_cpu_capability()}:{torch.get_num_threads()}"
    module = torch.get_device_module(device)
    return f"{device.type}:{module.get_device_name(device)}".replace(" ", "-")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    import torch

    if device_of(device).has_own_memory:
        torch.get_device_module(device).synchronize(device)


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A new stream for the calling thread, so that its kernels run concurrently with those of other threads.

    Does nothing on the host, where threads run concurrently anyway.
    """
    import torch

    if not device_of(device).has_own_memory:
        return nullcontext()
    module = torch.get_device_module(device)
    stream: AbstractContextManager[Any] = module.stream(module.Stream(device))
    return stream


_OF_THREAD = threading.local()


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """In here, for this thread, no value of a tensor decides what is computed next: a recording of it would
    repeat the decision."""
    before = getattr(_OF_THREAD, "has_fixed_shapes", False)
    _OF_THREAD.has_fixed_shapes = True
    try:
        yield
    finally:
        _OF_THREAD.has_fixed_shapes = before


def values_may_decide(device: torch.device) -> bool:
    """Whether values of tensors may decide what is computed next: on the host, where nothing is waited for to
    read them, and only where no program of fixed shapes is made."""
    import torch

    if device != HOST.torch or torch.compiler.is_exporting():
        return False
    return not getattr(_OF_THREAD, "has_fixed_shapes", False)


def autocast(device: torch.device, enabled: bool) -> torch.autocast:
    """A context that computes in the device's 16-bit type."""
    import torch

    return torch.autocast(device.type, getattr(torch, device_of(device).autocast_type), enabled=enabled)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, for devices that do not have autocast too."""
    import torch

    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def profile(device: torch.device) -> Any:
    """A profiling context for this process and the device's kernels; see `torch.profiler.profile`."""
    known = device_of(device)
    module = importlib.import_module(known.profiler)
    names = ["CPU"] if known.profiler_activity is None else ["CPU", known.profiler_activity]
    return module.profile(activities=[getattr(module.ProfilerActivity, name) for name in names])


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes."""

    allocated: int
    """Used by the tensors of this process."""
    peak: int
    """Largest `allocated` so far."""
    total: int
    """Memory that the device has."""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Memory that this process uses on the device; None if the device has no memory of its own."""
    import torch

    if not device_of(device).has_own_memory:
        return None
    module = torch.get_device_module(device)
    return DeviceMemory(
        int(module.memory_allocated(device)),
        int(module.max_memory_allocated(device)),
        int(module.get_device_properties(device).total_memory),
    )


def ascend_fusion_attention() -> Callable[..., Any]:
    """The fused attention kernel of Ascend NPUs, from torch's extension for them."""
    kernel: Callable[..., Any] = importlib.import_module("torch_npu").npu_fusion_attention
    return kernel


def ascend_quantized_product() -> Callable[..., Any]:
    """The product of int8 matrices of Ascend NPUs, from torch's extension for them."""
    kernel: Callable[..., Any] = importlib.import_module("torch_npu").npu_quant_matmul
    return kernel


def has_wide_int8_products(device: torch.device) -> bool:
    """Whether the host's CPU adds products of int8 in 32 bits (VNNI of AVX-512); without, some overflow."""
    import torch

    return device.type == HOST.kind and bool(torch.cpu._is_vnni_supported())


def has_float8_products(device: torch.device) -> bool:
    """Whether an NVIDIA GPU multiplies matrices of float8: from Ada and Hopper on."""
    import torch

    return bool(torch.get_device_module(device).get_device_capability(device) >= (8, 9))


def get_device(kind: str) -> Device:
    """The device named in a config, after a check that this process can use it.

    Raises:
        InputError: an unknown name, or a device this machine does not have.
    """
    device = device_named(kind)
    if (reason := why_missing(kind)) is not None:
        raise MachineError(f"device: {kind!r} was asked for, but {reason}; or set device to 'cpu'")
    return device


def device_memory_bytes(kind: str) -> int | None:
    """Memory of one such device of this machine; None if it has none of its own or is missing."""
    if not device_named(kind).has_own_memory or why_missing(kind) is not None:
        return None
    import torch

    # From its properties: asking for free memory creates a context, which keeps memory for good.
    return int(torch.get_device_module(kind).get_device_properties(0).total_memory)


def ray_claim(kind: str, share: float = 1) -> dict[str, Any]:
    """Ray options with which an actor claims an accelerator or a fraction of one; the driver may lack it."""
    device = device_named(kind)
    if not device.has_own_memory:  # counted by the actor's num_cpus
        return {}
    name = _RAY_OPTIONS.get(device.ray_resource)
    return {"resources": {device.ray_resource: share}} if name is None else {name: share}


_RAY_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Ray's key of a resource to the option that asks for it; other resources are asked for by their key."""


def ray_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Options with which an actor asks for these resources, given by Ray's keys."""
    options = {_RAY_OPTIONS[key]: count for key, count in resources.items() if key in _RAY_OPTIONS}
    others = {key: count for key, count in resources.items() if key not in _RAY_OPTIONS}
    # Without num_cpus, Ray places an actor only where a CPU is free.
    return {"num_cpus": 0, **options, "resources": others}


def claimed_resources(options: Mapping[str, Any]) -> dict[str, float]:
    """What an actor with these options asks for besides CPUs, by Ray's keys."""
    claimed = {key: options[name] for key, name in _RAY_OPTIONS.items() if name in options}
    claimed.pop(HOST.ray_resource, None)
    return {**options.get("resources", {}), **claimed}


def socket_of_card(environment: Mapping[str, str] = os.environ, sys: Path = Path("/sys")) -> int | None:
    """Number of the NUMA node that the first visible NVIDIA GPU is at; None: there is none, or nobody knows.

    Args:
        sys: where the kernel tells of devices.
    """
    visible = environment.get(CUDA_VISIBLE, "").split(",")[0].strip()
    if not visible or visible == "-1":
        return None
    try:
        number = int((sys / "bus" / "pci" / "devices" / _bus_of_gpu(visible) / "numa_node").read_text())
    except Exception as error:  # of a driver that is not there, too
        logger.debug("the socket of card %s is not known: %s", visible, error)
        return None
    return number if number >= 0 else None


def _bus_of_gpu(visible: str) -> str:
    """Address on the PCI bus, as /sys writes it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle_of = (
            pynvml.nvmlDeviceGetHandleByIndex if visible.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        )
        bus = pynvml.nvmlDeviceGetPciInfo(handle_of(int(visible) if visible.isdigit() else visible)).busId
    finally:
        pynvml.nvmlShutdown()
    return pci_address(bus.decode() if isinstance(bus, bytes) else bus)


def pci_address(bus: str) -> str:
    """NVML's `00000000:3B:00.0` as /sys has it, `0000:3b:00.0`."""
    return re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bus.lower())

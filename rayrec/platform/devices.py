"""The only place that knows `cuda`, `npu` or `cpu`, with `device_diagnosis`, which says why one is not there,
and `mps`, by which processes share one of the former. Needs torch alone.

Everything that differs between devices is a field of `Device`; moving a run
to another device changes the one line of its config that names it.

Torch is imported where a device is used: processes that only name one, those that compute features among
them, would take more than a second and 150 MB for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rayrec.platform.device_diagnosis import CUDA_VISIBLE, NPU_VISIBLE, why_no_cuda, why_no_npu
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    import torch

HOST_COLLECTIVE_BACKEND = "gloo"
"""Backend of `torch.distributed` for arrays in host memory, whatever the device."""


@dataclass(frozen=True)
class Device:
    """What the rest of the code may ask about the device it runs on."""

    kind: str
    """Name in the config: `cpu`, `cuda` or `npu`."""
    collective_backend: str
    """Backend of `torch.distributed` for tensors on this device."""
    ray_resource: str
    """Key under which Ray counts this device."""
    visibility_variable: str | None
    """Environment variable that says which of them a process may see; Ray sets it for its actors."""
    fused_optimizer: bool
    """Whether torch's fused optimizers exist for this device; else its optimizers go by lists of tensors."""
    has_own_memory: bool
    """Whether what it computes with has to be copied from the host's memory to its own."""
    attention_backends: tuple[str, ...]
    """Of `rayrec.models.attention`, those with kernels for it, the preferred first."""
    attention_without_backward: tuple[str, ...] = ()
    """Those of them that cannot be trained with."""
    autocast_type: str = "bfloat16"
    """Name of the 16-bit type of autocast. Of the two there are, all devices have this one, and gradients in
    it need no scaling."""
    profiler: str = "torch.profiler"
    """Module with `profile` and `ProfilerActivity` that see this device's kernels."""
    profiler_activity: str | None = None
    """What it calls them, beside those of the host."""
    has_mps: bool = False
    """Whether processes can share one by NVIDIA's Multi-Process Service, see `rayrec.platform.mps`."""

    @property
    def torch(self) -> torch.device:
        import torch

        return torch.device(self.kind)


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
            profiler_activity="CUDA",
            has_mps=True,
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
            profiler="torch_npu.profiler",
            profiler_activity="NPU",
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
"""The processor of the host, whose memory is everybody's."""


def why_missing(kind: str) -> str | None:
    """None where the device can be used, else one sentence on what would bring it."""
    try:
        return _DEVICES[kind][1]()
    except (ImportError, OSError, RuntimeError) as error:
        return f"{kind} cannot be initialized: {error}"


def device_named(kind: str) -> Device:
    """What is known of a device, whether or not this machine has it.

    Raises:
        InputError: an unknown name.
    """
    if kind not in _DEVICES:
        raise InputError(f"device: there is no device {kind!r}; expected one of {', '.join(KINDS)}")
    return _DEVICES[kind][0]


def device_of(device: torch.device) -> Device:
    """What is known of a tensor's device; of one that is unknown, that torch's own operations run on it."""
    if device.type in _DEVICES:
        return _DEVICES[device.type][0]
    return Device(device.type, "", "", None, False, True, attention_backends=("sdpa", "reference"))


def hardware_name(device: torch.device) -> str:
    """Which processor a device is, and with how many threads: times measured on another one mean nothing."""
    import torch

    if not device_of(device).has_own_memory:
        return f"{device.type}:{torch.backends.cpu.get_cpu_capability()}:{torch.get_num_threads()}"
    module = torch.get_device_module(device)
    return f"{device.type}:{module.get_device_name(device)}".replace(" ", "-")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to do."""
    import torch

    if device_of(device).has_own_memory:
        torch.get_device_module(device).synchronize(device)


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """What a thread asks of an accelerator inside the block goes beside what others ask; on the host, threads
    are beside each other anyway."""
    import torch

    if not device_of(device).has_own_memory:
        return nullcontext()
    module = torch.get_device_module(device)
    stream: AbstractContextManager[Any] = module.stream(module.Stream(device))
    return stream


def autocast(device: torch.device, enabled: bool) -> torch.autocast:
    """Around what is to be computed in the device's 16-bit type."""
    import torch

    return torch.autocast(device.type, getattr(torch, device_of(device).autocast_type), enabled=enabled)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Around what is to be computed in the types that it comes in, also on a device that has no autocast."""
    import torch

    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def profile(device: torch.device) -> Any:
    """A profiler of this process and of the device's kernels, as a context; see `torch.profiler.profile`."""
    known = device_of(device)
    module = importlib.import_module(known.profiler)
    names = ["CPU"] if known.profiler_activity is None else ["CPU", known.profiler_activity]
    return module.profile(activities=[getattr(module.ProfilerActivity, name) for name in names])


class DeviceMemory(NamedTuple):
    """Of one device, in bytes."""

    allocated: int
    """By the tensors of this process."""
    peak: int
    """Most of that so far."""
    total: int
    """That the device has."""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """What this process takes of the device's memory; None where it has none of its own."""
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


def get_device(kind: str) -> Device:
    """The device named in a config, to be used in this process.

    Raises:
        InputError: an unknown name, or a device this machine does not have.
    """
    device = device_named(kind)
    if (reason := why_missing(kind)) is not None:
        raise InputError(f"device: {kind!r} was asked for, but {reason}; or set device to 'cpu'")
    return device


def device_memory_bytes(kind: str) -> int | None:
    """Memory of one such device of this machine; None where it has none of its own, or is not here."""
    if not device_named(kind).has_own_memory or why_missing(kind) is not None:
        return None
    import torch

    # Of its properties: to ask what is free would make a context, which takes memory until the process ends.
    return int(torch.get_device_module(kind).get_device_properties(0).total_memory)


def ray_claim(kind: str, share: float = 1) -> dict[str, Any]:
    """Options with which an actor claims an accelerator, or a share of one; the driver may lack it."""
    device = device_named(kind)
    if not device.has_own_memory:  # counted by the actor's own num_cpus
        return {}
    name = _RAY_OPTIONS.get(device.ray_resource)
    return {"resources": {device.ray_resource: share}} if name is None else {name: share}


_RAY_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""By Ray's key of a resource, the option of an actor that asks for it; others are asked for by their key."""


def ray_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Options with which an actor asks for resources, of which each is given by Ray's key."""
    options = {_RAY_OPTIONS[key]: count for key, count in resources.items() if key in _RAY_OPTIONS}
    others = {key: count for key, count in resources.items() if key not in _RAY_OPTIONS}
    # An actor that does not say how many processors it takes is placed where one is free.
    return {"num_cpus": 0, **options, "resources": others}


def claimed_resources(options: Mapping[str, Any]) -> dict[str, float]:
    """By Ray's key, what an actor of such options asks for beside processors."""
    claimed = {key: options[name] for key, name in _RAY_OPTIONS.items() if name in options}
    claimed.pop(HOST.ray_resource, None)
    return {**options.get("resources", {}), **claimed}

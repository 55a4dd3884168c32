"""What NVML says of every GPU, as JSON on stdout: `python rayrec/platform/health/nvml.py`.

A process of its own, since a call into a driver that hangs cannot be given up by the process that made it.
It imports nothing of RayRec, so that it starts fast. A value that a GPU does not have is null; one that
could not be read is `{"why": ...}`.

    {"driver": "580.95", "devices": [{"index": 0, "name": ..., "uuid": ..., "bus": ..., "values": {...}}]}

Source: the NVML API reference (docs.nvidia.com/deploy/nvml-api), through its Python binding nvidia-ml-py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

THROTTLE_REASONS = {
    0x1: "gpu-idle",
    0x2: "applications-clocks",
    0x4: "sw-power-cap",
    0x8: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal-slowdown",
    0x40: "hw-thermal-slowdown",
    0x80: "hw-power-brake",
    0x100: "display-clocks",
}
"""Bits of `nvmlClocksEventReason*`."""
MOST_NVLINKS = 36
NVLINK_ERRORS = (0, 1, 2)
"""Counters `NVML_NVLINK_ERROR_DL_REPLAY`, `_RECOVERY` and `_CRC_FLIT`."""


def readers(nvml: Any) -> Mapping[str, Callable[[Any], Any]]:
    """By name of a value, how it is read from a GPU's handle.

    Args:
        nvml: the module `pynvml`.
    """

    def ecc(error: int, counter: int) -> Callable[[Any], Any]:
        return lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, error, counter)

    def remapped(position: int) -> Callable[[Any], Any]:
        return lambda gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[position]

    def retired(cause: int) -> Callable[[Any], Any]:
        return lambda gpu: len(nvml.nvmlDeviceGetRetiredPages(gpu, cause))

    def throttle(gpu: Any) -> list[str]:
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        except nvml.NVMLError_FunctionNotFound:  # its name before driver 535
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]

    def links(gpu: Any) -> list[int]:
        """Of those that the GPU has, 1 for each that is up."""
        found = []
        for link in range(MOST_NVLINKS):
            try:
                found.append(int(nvml.nvmlDeviceGetNvLinkState(gpu, link)))
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                break
        if not found:
            raise nvml.NVMLError_NotSupported
        return found

    def link_errors(gpu: Any) -> int:
        return sum(
            nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, counter)
            for link, is_up in enumerate(links(gpu))
            if is_up
            for counter in NVLINK_ERRORS
        )

    return {
        "ecc_corrected_volatile": ecc(0, 0),
        "ecc_uncorrected_volatile": ecc(1, 0),
        "ecc_corrected_aggregate": ecc(0, 1),
        "ecc_uncorrected_aggregate": ecc(1, 1),
        "rows_remapped_corrected": remapped(0),
        "rows_remapped_uncorrected": remapped(1),
        "remap_pending": remapped(2),
        "remap_failure": remapped(3),
        "pages_retired_single_bit": retired(0),
        "pages_retired_double_bit": retired(1),
        "retirement_pending": lambda gpu: nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
        "throttle": throttle,
        "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "power_limit_w": lambda gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "sm_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1),
        "memory_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, 2),
        "utilization_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "memory_used_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "memory_total_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
        "nvlinks_up": lambda gpu: sum(links(gpu)),
        "nvlinks_down": lambda gpu: links(gpu).count(0),
        "nvlink_errors": link_errors,
        "pcie_replays": lambda gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu),
    }


def read(nvml: Any) -> dict[str, Any]:
    """Everything of every GPU.

    Raises:
        NVMLError: there is no driver, or it answers to nothing.
    """
    nvml.nvmlInit()
    try:
        count = nvml.nvmlDeviceGetCount()
        devices = [_read_device(nvml, index) for index in range(count)]
        return {"driver": _text(nvml.nvmlSystemGetDriverVersion()), "devices": devices}
    finally:
        nvml.nvmlShutdown()


def _read_device(nvml: Any, index: int) -> dict[str, Any]:
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        device = {
            "index": index,
            "name": _text(nvml.nvmlDeviceGetName(gpu)),
            "uuid": _text(nvml.nvmlDeviceGetUUID(gpu)),
            "bus": _text(nvml.nvmlDeviceGetPciInfo(gpu).busId),
        }
    except nvml.NVMLError as error:  # the others may be well
        return {"index": index, "lost": str(error)}
    values: dict[str, Any] = {}
    for name, reader in readers(nvml).items():
        try:
            values[name] = reader(gpu)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            values[name] = None
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
            return {**device, "lost": str(error)}
        except nvml.NVMLError as error:
            values[name] = {"why": str(error)}
    return {**device, "values": values}


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main() -> int:
    try:
        import pynvml
    except ImportError:
        print(json.dumps({"why": "nvidia-ml-py is not installed"}))
        return 0
    try:
        print(json.dumps(read(pynvml)))
    except pynvml.NVMLError as error:
        print(json.dumps({"why": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

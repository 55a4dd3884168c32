"""The reader of NVML, with a driver that answers, lacks functions, refuses and loses a card."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from rayrec.platform.health.counters import CARD_VALUES, parse_nvml
from rayrec.platform.health.machine import Missing
from rayrec.platform.health.nvml import read, readers


def driver(count: int = 2, **changed: Any) -> Any:
    """Stands for the module `pynvml`: a handle is its card's index."""

    def const(value: Any) -> Any:
        return lambda *_: value

    def link(gpu: int, number: int) -> int:
        if number >= 4:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(number != 2)

    functions: dict[str, Any] = {
        "nvmlInit": const(None),
        "nvmlShutdown": const(None),
        "nvmlDeviceGetCount": const(count),
        "nvmlSystemGetDriverVersion": const("580.95.05"),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": const(b"NVIDIA H100 80GB HBM3"),
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
        "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{gpu:02X}:00.0"),
        "nvmlDeviceGetTotalEccErrors": lambda gpu, error, counter: 10 * error + counter,
        "nvmlDeviceGetRemappedRows": const((1, 2, 0, 1)),
        "nvmlDeviceGetRetiredPages": lambda gpu, cause: [7] * (cause + 1),
        "nvmlDeviceGetRetiredPagesPendingStatus": const(0),
        "nvmlDeviceGetCurrentClocksEventReasons": const(0x44),
        "nvmlDeviceGetTemperature": const(61),
        "nvmlDeviceGetPowerUsage": const(688_400),
        "nvmlDeviceGetEnforcedPowerLimit": const(700_000),
        "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 1755, 2: 2619}[kind],
        "nvmlDeviceGetUtilizationRates": const(SimpleNamespace(gpu=98, memory=40)),
        "nvmlDeviceGetMemoryInfo": const(SimpleNamespace(used=5, total=8)),
        "nvmlDeviceGetNvLinkState": link,
        "nvmlDeviceGetNvLinkErrorCounter": lambda gpu, link, counter: 1,
        "nvmlDeviceGetPcieReplayCounter": const(3),
        **{name: value for name, value in vars(pynvml).items() if name.startswith("NVMLError")},
        **changed,
    }
    return SimpleNamespace(**functions)


def fails_with(error: int) -> Any:
    def function(*_: Any) -> Any:
        raise pynvml.NVMLError(error)

    return function


def test_every_value_has_its_function_and_unit():
    said = read(driver())

    (first, second) = said["devices"]
    assert (first["name"], second["bus"]) == ("NVIDIA H100 80GB HBM3", "00000000:01:00.0")
    assert first["values"] == {
        "ecc_corrected_volatile": 0,
        "ecc_uncorrected_volatile": 10,
        "ecc_corrected_aggregate": 1,
        "ecc_uncorrected_aggregate": 11,
        "rows_remapped_corrected": 1,
        "rows_remapped_uncorrected": 2,
        "remap_pending": 0,
        "remap_failure": 1,
        "pages_retired_single_bit": 1,
        "pages_retired_double_bit": 2,
        "retirement_pending": 0,
        "throttle": ["sw-power-cap", "hw-thermal-slowdown"],
        "temperature_c": 61,
        "power_w": 688.4,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "utilization_percent": 98,
        "memory_used_bytes": 5,
        "memory_total_bytes": 8,
        "nvlinks_up": 3,
        "nvlinks_down": 1,
        "nvlink_errors": 9,
        "pcie_replays": 3,
    }
    assert set(readers(driver())) == {*CARD_VALUES, "throttle"}


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_what_a_card_or_driver_does_not_have_is_null(error):
    said = read(driver(nvmlDeviceGetTotalEccErrors=fails_with(error)))

    assert said["devices"][0]["values"]["ecc_uncorrected_volatile"] is None


def test_a_driver_from_before_535_says_why_clocks_are_low_by_another_name():
    missing = fails_with(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    old = driver(
        nvmlDeviceGetCurrentClocksEventReasons=missing,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x8,
    )

    assert read(old)["devices"][0]["values"]["throttle"] == ["hw-slowdown"]


def test_a_card_without_nvlink_has_no_links():
    said = read(driver(nvmlDeviceGetNvLinkState=fails_with(pynvml.NVML_ERROR_NOT_SUPPORTED)))

    assert [said["devices"][0]["values"][name] for name in ("nvlinks_up", "nvlink_errors")] == [None, None]


def test_what_cannot_be_read_says_why_and_the_rest_is_read():
    said = read(driver(nvmlDeviceGetTemperature=fails_with(pynvml.NVML_ERROR_UNKNOWN)))

    values = said["devices"][1]["values"]
    assert values["temperature_c"]["why"]
    assert values["sm_clock_mhz"] == 1755


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetRemappedRows"])
def test_a_lost_card_is_told_and_the_others_are_read(function):
    whole = driver()

    def lost(gpu: int, *more: Any) -> Any:
        if gpu == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return getattr(whole, function)(gpu, *more)

    (first, second) = read(driver(**{function: lost}))["devices"]

    assert "values" in first
    assert "lost" in second


def test_values_become_cards():
    cards, missing = parse_nvml(json.dumps(read(driver(1))))

    assert missing is None
    assert (cards[0].label, cards[0].throttle) == (
        "cuda 0 (0000:00:00)",
        ("sw-power-cap", "hw-thermal-slowdown"),
    )
    assert cards[0].values["power_w"] == 688.4
    assert parse_nvml('{"why": "Driver Not Loaded"}') == ([], Missing("NVML: Driver Not Loaded"))

"""What a machine says of itself: cards, kernel log, disks, memory, network, clock.

    nvml.py, npu-smi ─► cards ─┐
    dmesg, journalctl ─► events ├─► Counters ─► verdict.judge
    /proc, statvfs ────────────┘

Nothing is judged here. What could not be read is `Missing`, with the reason; what a card does not have, as
ECC on a desktop card, is None.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rayrec.platform.device_diagnosis import ASCEND_DRIVER, NVIDIA_DRIVER
from rayrec.platform.health.kernel_log import KernelEvent, parse_kernel_log
from rayrec.platform.health.machine import THIS_MACHINE, DiskFacts, Machine, Missing
from rayrec.platform.health.npu_smi import Chip, parse_ecc, parse_health, parse_table

CardKind = Literal["cuda", "npu"]
Value = float | None | Missing

CARD_VALUES = (
    "ecc_corrected_volatile",
    "ecc_uncorrected_volatile",
    "ecc_corrected_aggregate",
    "ecc_uncorrected_aggregate",
    "rows_remapped_corrected",
    "rows_remapped_uncorrected",
    "remap_pending",
    "remap_failure",
    "pages_retired_single_bit",
    "pages_retired_double_bit",
    "retirement_pending",
    "temperature_c",
    "power_w",
    "power_limit_w",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "utilization_percent",
    "memory_used_bytes",
    "memory_total_bytes",
    "nvlinks_up",
    "nvlinks_down",
    "nvlink_errors",
    "pcie_replays",
)
"""Volatile counts are since the driver was loaded, aggregate ones of the card's life."""
NVML_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("nvml.py")))
NPU_COMMAND = ("npu-smi", "info")
KERNEL_LOGS = (
    ("dmesg", "--kernel", "--nopager", "--time-format", "iso"),
    ("dmesg",),  # a busybox knows no options
    # Of months, as it may keep, reading would take seconds.
    ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short-iso", "-n", "20000"),
)
"""The first that may be read is."""


@dataclass(frozen=True)
class Card:
    """One accelerator."""

    kind: CardKind
    index: int
    name: str = ""
    """Model."""
    bus: str = ""
    """PCI address: domain of four digits, in lower case, without function."""
    uuid: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    """By the names of `CARD_VALUES`."""
    throttle: tuple[str, ...] | Missing | None = None
    """Why its clocks are lower than they could be."""
    health: str | Missing | None = None
    """The driver's own word, where it has one."""
    error_codes: str = ""
    """The driver's, behind that word."""
    lost: str | None = None
    """Why the driver cannot reach it; None where it can."""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.index}" + (f" ({self.bus})" if self.bus else "")

    def number(self, name: str) -> float | None:
        """A value that is there; None where it is not, for whatever reason."""
        value = self.values.get(name)
        return None if isinstance(value, Missing) else value


@dataclass(frozen=True)
class Memory:
    """Of the host, in bytes."""

    total: float
    available: float
    swap_total: float
    swap_free: float


@dataclass(frozen=True)
class Link:
    """One network interface since the machine's start."""

    name: str
    packets: int
    errors: int
    dropped: int


@dataclass(frozen=True)
class Counters:
    """One look at a machine."""

    time_s: float
    """By its own clock, UNIX seconds."""
    cards: tuple[Card, ...] = ()
    expected: Mapping[CardKind, int | None] = field(default_factory=dict)
    """Cards that there should be; None where only that there should be some is known."""
    events: tuple[KernelEvent, ...] | Missing = ()
    disks: Mapping[str, DiskFacts | Missing] = field(default_factory=dict)
    memory: Memory | Missing | None = None
    links: tuple[Link, ...] | Missing = ()
    drivers: Mapping[CardKind, Missing] = field(default_factory=dict)
    """Those of the expected cards that gave no answer, or only a part of one."""


def read_counters(
    machine: Machine = THIS_MACHINE,
    expected: Mapping[CardKind, int | None] | None = None,
    folders: Sequence[str] = (),
) -> Counters:
    """Look at everything once, in a fraction of a CPU-second; a driver that hangs is given up at its limit.

    Args:
        expected: cards that the machine should have, such as Ray's resources say; None believes the drivers.
        folders: further ones whose disks are looked at.
    """
    if expected is None:
        expected = drivers_here(machine)
    cards: list[Card] = []
    drivers: dict[CardKind, Missing] = {}
    for kind in expected:
        found, missing = _read_nvidia(machine) if kind == "cuda" else _read_ascend(machine)
        cards += found
        if missing is not None:
            drivers[kind] = missing
    return Counters(
        machine.clock(),
        tuple(cards),
        dict(expected),
        _read_kernel_log(machine),
        {folder: machine.disk(folder) for folder in dict.fromkeys([*machine.folders, *folders])},
        _read_memory(machine),
        _read_links(machine),
        drivers,
    )


def drivers_here(machine: Machine = THIS_MACHINE) -> dict[CardKind, int | None]:
    """Kinds of cards that there is a driver for."""
    found: dict[CardKind, int | None] = {}
    if machine.text(NVIDIA_DRIVER) is not None:
        found["cuda"] = None
    if machine.text(ASCEND_DRIVER) is not None:
        found["npu"] = None
    return found


def parse_nvml(output: str) -> tuple[list[Card], Missing | None]:
    """Read what `nvml.py` prints; and why that is not everything, if it is not."""
    try:
        said = json.loads(output)
        if "why" in said:
            return [], Missing(f"NVML: {said['why']}")
        return [_nvidia_card(device) for device in said["devices"]], None
    except (ValueError, TypeError, KeyError, AttributeError):
        return [], Missing(
            "NVML's values are cut off or not understood" if output.strip() else "NVML is silent"
        )


def _nvidia_card(device: Mapping[str, Any]) -> Card:
    index, lost = int(device["index"]), device.get("lost")
    card = Card(
        "cuda",
        index,
        str(device.get("name", "")),
        short_bus(str(device.get("bus", ""))),
        str(device.get("uuid", "")),
        lost=None if lost is None else str(lost),
    )
    if lost is not None:
        return card
    read = device["values"]
    throttle = read.get("throttle")
    return replace(
        card,
        values={name: _value(name, read[name]) for name in CARD_VALUES if name in read},
        throttle=tuple(map(str, throttle))
        if isinstance(throttle, list)
        else None
        if throttle is None
        else _missing(throttle),
    )


def _value(name: str, read: Any) -> Value:
    if read is None:
        return None
    if isinstance(read, int | float):
        return float(read)
    return _missing(read)


def _missing(read: Any) -> Missing:
    return Missing(str(read.get("why"))) if isinstance(read, dict) else Missing(f"not a number: {read!r}")


def short_bus(bus: str) -> str:
    """A PCI address as the kernel log has it: `00000000:9B:00.0` and `0000:9b:00` are one."""
    found = re.fullmatch(
        r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?", bus.strip()
    )
    return f"{found[1][-4:]}:{found[2]}:{found[3]}".lower() if found else bus.strip().lower()


def _read_nvidia(machine: Machine) -> tuple[list[Card], Missing | None]:
    ran = machine.run(NVML_COMMAND)
    if ran.failure is not None:
        return [], Missing(f"the reader of NVML {ran.failure}")
    return parse_nvml(ran.output)


def _read_ascend(machine: Machine) -> tuple[list[Card], Missing | None]:
    ran = machine.run(NPU_COMMAND)
    if ran.failure is not None:
        return [], Missing(f"npu-smi {ran.failure}")
    chips, wrong = parse_table(ran.output)
    listed = {
        (npu, kind): machine.run([*NPU_COMMAND, "-t", kind, "-i", str(npu)])
        for npu in dict.fromkeys(chip.npu for chip in chips)
        for kind in ("ecc", "health")
    }
    cards = []
    for index, chip in enumerate(chips):
        ecc, health = (listed[chip.npu, kind] for kind in ("ecc", "health"))
        values: dict[str, Value] = {**chip.values}
        counts = {} if ecc.failure is not None else parse_ecc(ecc.output)
        values.update(counts)
        if not counts:
            why = f"npu-smi info -t ecc {ecc.failure or 'printed no counts'}"
            values["ecc_uncorrected_volatile"] = Missing(why)
        word, codes = (None, "") if health.failure is not None else parse_health(health.output)
        cards.append(_npu_card(index, chip, values, word, codes))
    return cards, None if wrong is None else Missing(wrong)


def _npu_card(index: int, chip: Chip, values: Mapping[str, Value], word: str | None, codes: str) -> Card:
    # The list of one NPU says what is wrong; where it says nothing, or all is well, the table's word counts.
    said = chip.health if word in (None, "OK") else word
    if chip.bus is None:
        values = {**values, "utilization_percent": Missing("npu-smi's table ends before it")}
    return Card(
        "npu", index, chip.name, short_bus(chip.bus or ""), "", values, health=said, error_codes=codes
    )


def _read_kernel_log(machine: Machine) -> tuple[KernelEvent, ...] | Missing:
    failures = []
    for command in KERNEL_LOGS:
        ran = machine.run(command)
        if ran.failure is None and ran.output.strip():
            return tuple(parse_kernel_log(ran.output, machine.clock(), _uptime_s(machine)))
        failures.append(f"{command[0]} {ran.failure or 'printed nothing'}")
    return Missing("; ".join(dict.fromkeys(failures)))


def _uptime_s(machine: Machine) -> float | None:
    try:
        return float((machine.text("/proc/uptime") or "").split()[0])
    except (IndexError, ValueError):
        return None


def _read_memory(machine: Machine) -> Memory | Missing:
    read = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.text("/proc/meminfo") or "", re.MULTILINE))
    try:
        total, available = (1024.0 * int(read[name]) for name in ("MemTotal", "MemAvailable"))
    except KeyError as error:
        return Missing(f"/proc/meminfo has no {error.args[0]}")
    swap = [1024.0 * int(read.get(name, 0)) for name in ("SwapTotal", "SwapFree")]
    return Memory(total, available, *swap)


def _read_links(machine: Machine) -> tuple[Link, ...] | Missing:
    text = machine.text("/proc/net/dev")
    if text is None:
        return Missing("/proc/net/dev cannot be read")
    links = []
    for line in text.splitlines()[2:]:
        name, _, counts = line.partition(":")
        numbers = [int(each) for each in counts.split() if each.isdecimal()]
        if len(numbers) != 16:
            return Missing("/proc/net/dev is cut off")
        received, sent = numbers[:8], numbers[8:]
        if name.strip() != "lo":
            links.append(
                Link(
                    name.strip(),
                    received[1] + sent[1],
                    # Totals: frame and carrier errors, which have columns of their own, are in them
                    # (struct rtnl_link_stats64 of the kernel).
                    received[2] + sent[2],
                    received[3] + sent[3],
                )
            )
    return tuple(links)

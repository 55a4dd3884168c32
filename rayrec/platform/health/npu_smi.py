"""What `npu-smi` prints, as values: its table of all NPUs, and its lists of one NPU's counters.

The table has two rows per chip, whatever the width of the columns and the language of their titles:

    | 0     910B3      | OK            | 93.6        36          0    / 0             |
    | 0     0          | 0000:C1:00.0  | 0           0    / 0    3415 / 65536         |

Sources of the format: outputs in issues of vllm-project/vllm-ascend (#2534, #4989, #12980), the npu-smi
reference of Atlas (hiascend.com), and the DCMI health codes 0 to 3 behind the words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

HEALTH_WORDS = frozenset({"OK", "Warning", "Alarm", "Critical", "UNKNOWN"})
"""DCMI's 0 to 3, and what it says of a chip that does not answer."""

_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(\.\d)?")
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)?")
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_FIRST = re.compile(r"(\d+)\s+(\S*[^\d\s]\S*)")
_ECC = {
    "hbm single bit error count": "ecc_corrected_volatile",
    "hbm double bit error count": "ecc_uncorrected_volatile",
    "hbm single bit aggregate total err cnt": "ecc_corrected_aggregate",
    "hbm double bit aggregate total err cnt": "ecc_uncorrected_aggregate",
    "hbm single bit isolated pages count": "pages_retired_single_bit",
    "hbm double bit isolated pages count": "pages_retired_double_bit",
    "ddr single bit error count": "ecc_corrected_volatile",
    "ddr double bit error count": "ecc_uncorrected_volatile",
    "ddr single bit aggregate total err cnt": "ecc_corrected_aggregate",
    "ddr double bit aggregate total err cnt": "ecc_uncorrected_aggregate",
    "ddr single bit isolated pages count": "pages_retired_single_bit",
    "ddr double bit isolated pages count": "pages_retired_double_bit",
}


@dataclass(frozen=True)
class Chip:
    """One NPU's rows of the table."""

    npu: int
    chip: int
    name: str
    health: str
    """The word as it is printed; see `HEALTH_WORDS`."""
    bus: str | None
    """None where the table ends before it."""
    values: dict[str, float] = field(default_factory=dict)
    """Those of `rayrec.platform.health.counters.CARD_VALUES` that the table has."""


def parse_table(output: str) -> tuple[list[Chip], str | None]:
    """Read `npu-smi info`.

    Returns:
        Every chip of which there is something; and what is wrong with the table, None if it is whole.
    """
    chips: list[Chip] = []
    before: tuple[int, str, str, list[str]] | None = None
    for cells in _rows(output):
        first = _FIRST.fullmatch(cells[0])
        if first is not None and len(cells) >= 2:
            if before is not None:
                chips.append(_half(before))
            before = int(first[1]), first[2], cells[1], cells[2:]
        elif before is not None and len(cells) >= 2 and _BUS.fullmatch(cells[1]):
            npu, name, health, rest = before
            chip = int(cells[0].split()[0])
            chips.append(Chip(npu, chip, name, health, cells[1], _first_row(rest) | _second_row(cells[2:])))
            before = None
    if before is not None:
        chips.append(_half(before))
    if not output.strip():
        return chips, "npu-smi printed nothing"
    if not chips:
        return chips, "npu-smi printed no table of NPUs"
    if any(chip.bus is None for chip in chips) or not output.rstrip().endswith(("+", "|")):
        return chips, "npu-smi's table is cut off"
    return chips, None


def parse_ecc(output: str) -> dict[str, float]:
    """Read `npu-smi info -t ecc -i N`: counts of the NPU's memory, HBM and DDR together."""
    found: dict[str, float] = {}
    for name, value in _pairs(output):
        if (known := _ECC.get(name)) is not None and value.isdecimal():
            found[known] = found.get(known, 0.0) + int(value)
    return found


def parse_health(output: str) -> tuple[str | None, str]:
    """Read `npu-smi info -t health -i N`: the worst chip's word, None without one; and the error codes."""
    order = ["OK", "Warning", "Alarm", "Critical"]
    pairs = list(_pairs(output))
    words = [value for name, value in pairs if name in ("health", "health status", "healthy")]
    codes = [value for name, value in pairs if name == "error code" and value not in ("NA", "N/A", "0")]
    if not words:
        return None, ""
    unknown = [word for word in words if word not in order]
    return unknown[0] if unknown else max(words, key=order.index), ", ".join(codes)


def _rows(output: str) -> Iterator[list[str]]:
    for line in output.splitlines():
        line = line.strip()
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0]:
                yield cells


def _pairs(output: str) -> Iterator[tuple[str, str]]:
    for line in output.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield " ".join(name.split()).lower(), value.strip()


def _half(row: tuple[int, str, str, list[str]]) -> Chip:
    npu, name, health, rest = row
    return Chip(npu, 0, name, health, None, _first_row(rest))


def _first_row(cells: list[str]) -> dict[str, float]:
    """Power and temperature; the second chip of a card has `-` for the power that the first one says."""
    words = cells[0].split() if cells else []
    names = ("power_w", "temperature_c")
    return {
        name: float(word.replace(",", "."))
        for name, word in zip(names, words, strict=False)
        if _NUMBER.fullmatch(word)
    }


def _second_row(cells: list[str]) -> dict[str, float]:
    """Utilization, and the last of the usages: HBM where there is any, otherwise DDR."""
    if not cells:
        return {}
    found: dict[str, float] = {}
    if (number := _NUMBER.match(cells[0])) is not None:
        found["utilization_percent"] = float(number[0].replace(",", "."))
    usages = [(int(used), int(total)) for used, total in _USAGE.findall(cells[0]) if int(total)]
    if usages:
        used, total = usages[-1]
        found |= {"memory_used_bytes": used * 2.0**20, "memory_total_bytes": total * 2.0**20}
    return found

"""Hardware errors in the kernel's log: which device, what, and when.

The messages are the kernel's and the drivers' own and have no locale; only the time before them has, where
it is written by syslog. A line whose time cannot be read counts as new.

Sources of the formats: NVIDIA's "XID Errors" and Fabric Manager guide (SXid), lines quoted in issues of
leptonai/gpud (#46, #338, #1174, #1209) and NVIDIA/open-gpu-kernel-modules (#1150); Ascend's driver in issues
of openEuler; the kernel's own printk formats (drivers/edac, mm/oom_kill.c, block/blk-core.c, fs/ext4, nvme).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

Code = Literal[
    "xid",
    "sxid",
    "cut-off",
    "ascend-device",
    "ascend-driver",
    "memory-corrected",
    "memory-uncorrected",
    "machine-check",
    "machine-check-fatal",
    "oom-kill",
    "disk-io",
    "disk-read-only",
    "nic-down",
    "nic-up",
    "pcie-fatal",
    "lockup",
]

DAY_S = 24 * 3600.0
LINE_CHARACTERS = 240
"""Kept of a line."""
NO_DISK_OF_THE_NODE = re.compile(r"(?:fd|sr|scd|loop)\d")
"""Floppy and optical drives, of virtual machines mostly, and files that somebody has mounted: their errors
say nothing of what work needs."""


@dataclass(frozen=True)
class KernelEvent:
    """One line that says something of the hardware."""

    code: Code
    subject: str
    """Device as the kernel names it; `node` where it names none."""
    line: str
    number: int | None = None
    """Of an XID or SXid."""
    time_s: float | None = None
    """UNIX seconds; None where the line does not say when, or not in a way that can be read."""
    weight: int = 1
    """Errors that the line reports together."""


_PATTERNS: tuple[tuple[Code, str], ...] = (
    (
        "xid",
        r"NVRM:? ?Xid \((?:PCI:)?(?P<subject>[0-9a-fA-F:.]+)(?: GPU-I:\d+)?\): (?P<number>\d+)",
    ),
    ("sxid", r"(?P<subject>nvidia-nvswitch\d+): SXid \([^)]*\): (?P<number>\d+)"),
    ("xid", r"NVRM:? .*?(?P<subject>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}).*fallen off the bus"),
    ("xid", r"NVRM:? .*fallen off the bus"),
    ("cut-off", r"NVRM:? ?Xid|nvidia-nvswitch\d+: SXid"),
    (
        "ascend-device",
        r"\[ascend\].*?(?i:device is abnormal|heart ?beat (?:is )?lost|lost heart ?beat|hot ?reset fail)"
        r"(?:.*?(?:dev_id|devid|device_id)=(?P<subject>\d+))?",
    ),
    (
        "ascend-driver",
        r"\[ascend\].*(?i:\[error\]|unsuccessful|fail)(?:.*?(?:dev_id|devid|device_id)=(?P<subject>\d+))?",
    ),
    ("memory-corrected", r"EDAC (?P<subject>[A-Z]+\d+): (?P<weight>\d+) CE "),
    ("memory-uncorrected", r"EDAC (?P<subject>[A-Z]+\d+): (?P<weight>\d+) UE "),
    ("memory-uncorrected", r"Memory failure: 0x[0-9a-f]+: "),
    ("machine-check-fatal", r"\[Hardware Error\]:.*(?:Processor context corrupt|[Ff]atal|Uncorrected)"),
    ("machine-check", r"mce: \[Hardware Error\]: Machine check events logged"),
    ("oom-kill", r"Out of memory: Killed process \d+ \((?P<subject>[^)]*)\)"),
    ("disk-read-only", r"\((?:device )?(?P<subject>[\w-]+)\).*Remounting filesystem read-only"),
    (
        "disk-read-only",
        r"(?P<subject>[\w-]+)\): .*(?:Corruption of in-memory data|Shutting down filesystem)",
    ),
    ("disk-io", r"(?:I/O|critical \w+|print_req_error: \w+) error,? (?:on )?dev (?P<subject>[\w-]+)"),
    ("disk-io", r"(?:EXT4-fs|BTRFS) error \(device (?P<subject>[\w-]+)\)"),
    ("disk-io", r"XFS \((?P<subject>[\w-]+)\): .*(?:I/O error|[Cc]orruption)"),
    ("disk-io", r"(?P<subject>nvme\d+): (?:I/O \d+ .*timeout|controller is down)"),
    (
        "nic-down",
        r"(?P<subject>[A-Za-z][\w.-]*):? (?:NIC )?(?:Link is Down|Link down|Lost carrier)",
    ),
    ("nic-down", r"(?P<subject>\w+): Port: \d+ Link DOWN"),
    ("nic-down", r"link status definitely down for interface (?P<subject>[\w.-]+)"),
    ("nic-up", r"(?P<subject>[A-Za-z][\w.-]*):? (?:NIC )?(?:Link is Up|Link up|Gained carrier)"),
    ("nic-up", r"link status definitely up for interface (?P<subject>[\w.-]+)"),
    ("pcie-fatal", r"(?P<subject>[0-9a-fA-F:.]{7,}): (?:AER|PCIe Bus Error):.*[Uu]ncorrect.*\(Fatal\)"),
    (
        "lockup",
        r"(?:watchdog: BUG: (?:soft|hard) lockup|INFO: task \S+ blocked for more than \d+ seconds)",
    ),
)
"""In this order: the first that fits says what a line is."""
_ONE_OF = re.compile(
    r"NVRM|SXid|ascend|EDAC|Memory failure|Hardware Error|Out of memory|read-only|Corruption|Shutting down|"
    r"error|nvme|[Ll]ink|carrier|AER|PCIe Bus|lockup|blocked for",
)
"""Most lines have none of these words, and are looked at once only."""
_COMPILED = tuple((code, re.compile(pattern)) for code, pattern in _PATTERNS)

_SINCE_BOOT = re.compile(r"^\s*(?:<\d+>)?\[\s*(\d+\.\d+)\]")
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,]\d+)?(?:([+-]\d\d):?(\d\d)|Z)?")
_C_TIME = re.compile(r"^\[?(?:[A-Z][a-z]{2} )?([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d)(?: (\d{4}))?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def parse_kernel_log(text: str, now_s: float, uptime_s: float | None) -> list[KernelEvent]:
    """Events of a log as `dmesg`, `journalctl -k` or syslog write it, in its order.

    Args:
        now_s: UNIX seconds, for the year that some times lack.
        uptime_s: of the machine, for times that count from its start; None leaves them out.
    """
    return list(_events(text, now_s, uptime_s))


def _events(text: str, now_s: float, uptime_s: float | None) -> Iterator[KernelEvent]:
    for line in text.splitlines():
        if _ONE_OF.search(line) is None:
            continue
        for code, pattern in _COMPILED:
            if (found := pattern.search(line)) is None:
                continue
            parts = found.groupdict()
            if code.startswith("disk-") and NO_DISK_OF_THE_NODE.match(parts["subject"]):
                break
            number = parts.get("number")
            fallen = code == "xid" and number is None
            yield KernelEvent(
                code,
                parts.get("subject") or "node",
                line.strip()[-LINE_CHARACTERS:],
                79 if fallen else int(number) if number else None,
                _time(line, now_s, uptime_s),
                int(parts.get("weight") or 1),
            )
            break


def _time(line: str, now_s: float, uptime_s: float | None) -> float | None:
    if (since := _SINCE_BOOT.match(line)) is not None:
        return None if uptime_s is None else now_s - uptime_s + float(since[1])
    if (iso := _ISO.search(line[:80])) is not None:
        zone = f"{iso[3]}:{iso[4]}" if iso[3] else "+00:00"
        return _stamp(f"{iso[1]}T{iso[2]}{zone}")
    if (words := _C_TIME.match(line)) is None or words[1] not in _MONTHS:
        return None
    month, day = _MONTHS.index(words[1]) + 1, int(words[2])
    this_year = datetime.fromtimestamp(now_s, UTC).year
    years = [int(words[4])] if words[4] else [this_year + 1, this_year, this_year - 1]
    stamps = [_stamp(f"{year:04}-{month:02}-{day:02}T{words[3]}+00:00") for year in years]
    if words[4]:
        return stamps[0]
    # Without a year it is the last such day; a day's margin for the time zone.
    return next((at for at in stamps if at is not None and at <= now_s + DAY_S), None)


def _stamp(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # the 31st of a month that has none
        return None

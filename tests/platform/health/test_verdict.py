"""Recorded outputs of drivers, tools and kernel logs, and the verdict that each deserves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rayrec.platform.health.counters import (
    NVML_COMMAND,
    Card,
    CardKind,
    Counters,
    Link,
    read_counters,
)
from rayrec.platform.health.findings import AS_NUMBER, Finding, strongest_action, worst
from rayrec.platform.health.kernel_log import parse_kernel_log
from rayrec.platform.health.machine import DiskFacts, Machine, Missing, Ran, run_command
from rayrec.platform.health.verdict import Limits, Seen, clock_finding, judge
from rayrec.platform.health.xids import XIDS
from tests.helpers.examples import share_of

RECORDED = Path(__file__).parent / "recorded"
NOW_S = datetime(2026, 11, 26, 10, 0, tzinfo=UTC).timestamp()
MEMINFO = """\
MemTotal:       263846424 kB
MemFree:        151234100 kB
MemAvailable:   200123456 kB
SwapTotal:        8388604 kB
SwapFree:         8388604 kB
"""
NET = """\
Inter-|   Receive                              |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop ...
    lo: 23960712 537767 0 0 0 0 0 0 23960712 537767 0 0 0 0 0 0
  eth0: 99607126 9537767 1 7 0 0 0 0 79607126 8537767 0 0 0 0 0 0
"""
ROOMY = DiskFacts(10**12, 5 * 10**11, 10**7, 9 * 10**6, False)


def recorded(name: str) -> str:
    return (RECORDED / name).read_bytes().decode(errors="replace")


def machine(
    nvml: Ran | None = None,
    npu: dict[str, Ran] | None = None,
    kernel: Ran | None = None,
    disk: DiskFacts | Missing = ROOMY,
    files: dict[str, str] | None = None,
) -> Machine:
    """One whose parts are well where nothing else is said of them."""
    logs = Ran(recorded("kernel/quiet.log")) if kernel is None else kernel
    answers = {} if npu is None else npu
    texts = {"/proc/meminfo": MEMINFO, "/proc/net/dev": NET, "/proc/uptime": "3600.00 7000.00"}
    texts |= files or {}

    def run(command: Sequence[str]) -> Ran:
        if tuple(command) == NVML_COMMAND:
            return nvml or Ran("", "is not installed")
        if command[0] == "npu-smi":
            return answers.get(" ".join(command[2:4]), Ran("", "is not installed"))
        if command[0] == "dmesg":
            return logs
        return Ran("No journal files were found.\n", "ended with exit code 1")

    return Machine(run=run, text=texts.get, disk=lambda _: disk, folders=("/tmp",), clock=lambda: NOW_S)


def look(around: Machine, **expected: int | None) -> Counters:
    kinds: dict[CardKind, int | None] = {
        kind: expected[kind]
        for kind in ("cuda", "npu")
        if kind in expected  # type: ignore[misc]
    }
    return read_counters(around, kinds)


def wrong(findings: Sequence[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.verdict != "ok"}


NVML_CASES = [
    ("h100-healthy", "ok", set()),
    ("h100-uncorrected-ecc", "bad", {"ecc-uncorrected"}),
    ("h100-remap-failed", "bad", {"row-remap-failed"}),
    ("h100-remap-pending", "suspect", {"row-remap-pending"}),
    ("h100-thermal-slowdown", "suspect", {"throttled"}),
    ("h100-hot", "suspect", {"hotter-than-peers"}),
    ("h100-slow-clock", "suspect", {"slower-than-peers"}),
    ("h100-slow-but-idle", "ok", set()),
    ("h100-three-of-four", "unknown", {"card-missing"}),
    ("h100-lost", "bad", {"card-lost"}),
    ("h100-nvlink-down", "suspect", {"nvlink-down"}),
    ("h100-many-corrected", "suspect", {"ecc-corrected"}),
    ("h100-value-unreadable", "unknown", {"card-unreadable"}),
    ("h100-decimal-comma", "unknown", {"card-unreadable"}),
    ("h100-newer-reader", "ok", set()),
    ("v100-pages-retired", "bad", {"pages-retired"}),
    ("v100-retirement-pending", "suspect", {"page-retirement-pending"}),
    ("rtx4090-without-ecc", "ok", set()),
    ("driver-not-loaded", "unknown", {"driver-silent"}),
    ("version-mismatch", "unknown", {"driver-silent"}),
    ("cut-off", "unknown", {"driver-silent"}),
    ("empty", "unknown", {"driver-silent"}),
    ("another-program", "unknown", {"driver-silent"}),
]


@pytest.mark.parametrize(("name", "verdict", "codes"), NVML_CASES)
def test_values_of_nvml_get_the_right_verdict(name, verdict, codes):
    count = {"v100": 2, "rtx4": 1}.get(name[:4], 4)

    findings = judge(look(machine(nvml=Ran(recorded(f"nvml/{name}.json"))), cuda=count))

    assert (worst(findings), wrong(findings)) == (verdict, codes)


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        (Ran(recorded("nvml/h100-healthy.json"), "ended with exit code 1"), "exit code 1"),
        (Ran("", "did not answer in 10 s"), "did not answer in 10 s"),
        (Ran("", "is not installed"), "is not installed"),
    ],
    ids=["lies", "hangs", "absent"],
)
def test_a_driver_that_hangs_or_fails_is_unknown_whatever_it_printed(ran, why):
    (silent,) = [one for one in judge(look(machine(nvml=ran), cuda=4)) if one.verdict != "ok"]

    assert (silent.code, silent.verdict, silent.action) == ("driver-silent", "unknown", "none")
    assert why in silent.detail


NPU_CASES = [
    ("910b-healthy", "ecc-clean", "health-ok", "ok", set()),
    ("910b-decimal-comma", "ecc-clean", "health-ok", "ok", set()),
    ("910-two-chips", "ecc-clean", "health-ok", "ok", set()),
    ("310p-ddr", "ecc-clean", "health-ok", "ok", set()),
    ("910b-warning", "ecc-clean", "health-ok", "suspect", {"driver-health"}),
    ("910b-alarm", "ecc-clean", "health-ok", "bad", {"driver-health"}),
    ("910b-healthy", "ecc-clean", "health-critical", "bad", {"driver-health"}),
    ("910b-unknown-word", "ecc-clean", "health-ok", "unknown", {"driver-health"}),
    ("910b-translated", "ecc-clean", "health-ok", "unknown", {"driver-health"}),
    ("910b-offline", "ecc-clean", "health-ok", "unknown", {"driver-health"}),
    ("910b-healthy", "ecc-double-bit", "health-ok", "bad", {"ecc-uncorrected"}),
    ("910b-healthy", "ecc-isolated-pages", "health-ok", "bad", {"pages-retired"}),
    ("910b-healthy", "ecc-unsupported", "health-ok", "unknown", {"card-unreadable"}),
    ("910b-cut-off", "ecc-clean", "health-ok", "unknown", {"driver-silent", "card-unreadable"}),
    ("empty", "ecc-clean", "health-ok", "unknown", {"driver-silent"}),
    ("dcmi-failed", "ecc-clean", "health-ok", "unknown", {"driver-silent"}),
]


@pytest.mark.parametrize(("table", "ecc", "health", "verdict", "codes"), NPU_CASES)
def test_output_of_npu_smi_gets_the_right_verdict(table, ecc, health, verdict, codes):
    answers = {"": table, "-t ecc": ecc, "-t health": health}
    npu = {command: Ran(recorded(f"npu_smi/{name}.txt")) for command, name in answers.items()}

    findings = judge(look(machine(npu=npu), npu=None))

    assert (worst(findings), wrong(findings)) == (verdict, codes)


@pytest.mark.parametrize("failure", ["ended with exit code 1", "did not answer in 10 s"])
def test_an_npu_smi_that_says_ok_and_fails_is_unknown(failure):
    npu = {"": Ran(recorded("npu_smi/910b-healthy.txt"), failure)}

    findings = judge(look(machine(npu=npu), npu=2))

    assert (worst(findings), wrong(findings)) == ("unknown", {"driver-silent"})


KERNEL_CASES = [
    ("quiet", "ok", "none", set()),
    ("xid-79", "bad", "leave", {"xid-79"}),
    ("xid-48", "bad", "leave", {"xid-48"}),
    ("xid-application", "ok", "none", set()),
    ("xid-94", "suspect", "avoid", {"xid-94"}),
    ("xid-mig", "bad", "leave", {"xid-95"}),
    ("xid-not-in-catalog", "unknown", "none", {"xid-999"}),
    ("xid-149-fatal", "bad", "leave", {"xid-149"}),
    ("xid-145-nonfatal", "suspect", "avoid", {"xid-145"}),
    ("xid-154-reset", "bad", "leave", {"xid-154"}),
    ("xid-154-none", "ok", "none", set()),
    ("xid-without-pci", "bad", "leave", {"xid-64"}),
    ("xid-days-ago", "ok", "none", set()),
    ("xid-cut-off", "unknown", "none", {"cut-off"}),
    ("xid-german-syslog", "bad", "leave", {"xid-95"}),
    ("xid-other-bytes", "bad", "leave", {"xid-48"}),
    ("fallen-off-the-bus", "bad", "leave", {"xid-79"}),
    ("sxid-fatal", "bad", "leave", {"sxid-20009"}),
    ("sxid-non-fatal", "suspect", "avoid", {"sxid-28006"}),
    ("sxid-data-only", "unknown", "none", {"sxid-12028"}),
    ("ascend-abnormal", "bad", "leave", {"ascend-device"}),
    ("ascend-error", "suspect", "avoid", {"ascend-driver"}),
    ("memory-few-corrected", "ok", "none", set()),
    ("memory-many-corrected", "suspect", "avoid", {"memory-corrected"}),
    ("memory-uncorrected", "bad", "leave", {"memory-uncorrected"}),
    ("machine-check", "suspect", "avoid", {"machine-check"}),
    ("machine-check-fatal", "bad", "leave", {"machine-check-fatal"}),
    ("oom-kill", "suspect", "none", {"oom-kill"}),
    ("disk-error", "suspect", "avoid", {"disk-io"}),
    ("disk-many-errors", "bad", "leave", {"disk-io"}),
    ("disk-remounted", "bad", "leave", {"disk-io", "disk-read-only"}),
    ("nic-one-flap", "ok", "none", set()),
    ("nic-flaps", "suspect", "avoid", {"nic-flaps"}),
    ("pcie-fatal", "bad", "leave", {"pcie-fatal"}),
    ("lockup", "suspect", "avoid", {"lockup"}),
]


@pytest.mark.parametrize(("name", "verdict", "action", "codes"), KERNEL_CASES)
def test_kernel_logs_get_the_right_verdict(name, verdict, action, codes):
    findings = judge(look(machine(kernel=Ran(recorded(f"kernel/{name}.log")))))

    assert (worst(findings), strongest_action(findings), wrong(findings)) == (verdict, action, codes)


def test_no_recorded_output_is_left_out():
    told = {f"nvml/{name}.json" for name, *_ in NVML_CASES}
    told |= {f"npu_smi/{name}.txt" for case in NPU_CASES for name in case[:3]}
    told |= {f"kernel/{name}.log" for name, *_ in KERNEL_CASES}
    there = {str(path.relative_to(RECORDED)) for path in RECORDED.rglob("*") if path.is_file()}

    assert told == there - {"README.md"}
    assert len(told) >= 30


@pytest.mark.parametrize("folder", ["nvml", "npu_smi", "kernel"])
def test_however_an_output_is_cut_off_nothing_crashes_and_no_card_is_called_healthy(folder):
    for path in sorted((RECORDED / folder).iterdir()):
        text = path.read_bytes().rstrip()
        for end in range(0, len(text), max(1, len(text) // share_of(60))):
            cut = Ran(text[:end].decode(errors="replace"))
            around = {
                "nvml": machine(nvml=cut),
                "npu_smi": machine(npu={"": cut, "-t ecc": cut, "-t health": cut}),
                "kernel": machine(kernel=cut),
            }[folder]
            expected = {"nvml": {"cuda": 4}, "npu_smi": {"npu": 8}, "kernel": {}}[folder]
            verdict = worst(judge(look(around, **expected)))
            assert folder == "kernel" or verdict != "ok", (path.name, end)


def test_an_xid_names_the_card_by_its_address_on_the_bus():
    around = machine(nvml=Ran(recorded("nvml/h100-healthy.json")), kernel=Ran(recorded("kernel/xid-79.log")))

    (found,) = [one for one in judge(look(around, cuda=4)) if one.verdict != "ok"]

    assert found.subject == "cuda 2 (0000:9b:00)"
    assert "fallen off the bus" in found.detail


def test_a_kernel_log_that_may_not_be_read_is_unknown_and_says_why():
    refused = Ran("dmesg: read kernel buffer failed: Operation not permitted\n", "ended with exit code 1")

    (found,) = [one for one in judge(look(machine(kernel=refused))) if one.verdict != "ok"]

    assert (found.code, found.verdict) == ("kernel-log", "unknown")
    assert "dmesg ended with exit code 1; journalctl ended with exit code 1" in found.detail


@pytest.mark.parametrize(
    ("disk", "verdict", "code"),
    [
        (ROOMY._replace(free_bytes=10**9), "suspect", "disk-space"),
        (ROOMY._replace(free_inodes=12), "suspect", "disk-inodes"),
        (ROOMY._replace(is_read_only=True), "bad", "disk-read-only"),
        (ROOMY._replace(total_inodes=0, free_inodes=0), "ok", None),
        (Missing("/tmp: the file system did not answer in 3 s"), "unknown", "disk-unreadable"),
    ],
)
def test_disks(disk, verdict, code):
    findings = judge(look(machine(disk=disk)))

    assert (worst(findings), wrong(findings)) == (verdict, {code} if code else set())


@pytest.mark.parametrize(
    ("text", "verdict", "code"),
    [
        (MEMINFO.replace("200123456", "4123456"), "suspect", "memory-available"),
        (
            MEMINFO.replace("SwapFree:         8388604", "SwapFree:         1388604"),
            "suspect",
            "memory-swapped",
        ),
        (MEMINFO[:30], "unknown", "memory-unreadable"),
    ],
)
def test_memory(text, verdict, code):
    findings = judge(look(machine(files={"/proc/meminfo": text})))

    assert (worst(findings), wrong(findings)) == (verdict, {code})


@pytest.mark.parametrize(
    ("text", "verdict", "code"),
    [
        (NET.replace("9537767 1 ", "9537767 99537 "), "suspect", "network-errors"),
        (NET.replace(" 1 7 0", " 1 999999 0"), "suspect", "network-drops"),
        (NET[:-20], "unknown", "network-unreadable"),
    ],
)
def test_network(text, verdict, code):
    findings = judge(look(machine(files={"/proc/net/dev": text})))

    assert (worst(findings), wrong(findings)) == (verdict, {code})


def test_errors_of_a_network_that_are_over_count_no_more():
    before = Counters(NOW_S - 60, links=(Link("eth0", 1_000_000, 90_000, 0),))
    now = Counters(NOW_S, links=(Link("eth0", 2_000_000, 90_010, 0),))

    assert worst(judge(now)) == "suspect"
    assert worst(judge(now, before)) == "ok"


def test_replays_and_link_errors_count_by_the_minute():
    def counters(time_s: float, replays: float, errors: float) -> Counters:
        values = {"pcie_replays": replays, "nvlink_errors": errors}
        return Counters(time_s, (Card("cuda", 0, "H100", "0000:18:00", values=values),))

    before = counters(0.0, 1_000.0, 50_000.0)

    assert wrong(judge(counters(600.0, 1_050.0, 50_500.0), before)) == set()
    assert wrong(judge(counters(600.0, 1_200.0, 52_000.0), before)) == {"pcie-replays", "nvlink-errors"}
    # A driver that was loaded again counts from 0.
    assert wrong(judge(counters(600.0, 3.0, 0.0), before)) == set()


def test_cards_of_other_machines_are_peers_too():
    def card(index: int, heat: float) -> Card:
        return Card("cuda", index, "H100", values={"temperature_c": heat, "utilization_percent": 98.0})

    alone = Counters(NOW_S, (card(0, 84.0),))

    assert wrong(judge(alone)) == set()  # a data sheet would be needed
    assert wrong(judge(alone, peers=[card(n, 60.0) for n in range(3)])) == {"hotter-than-peers"}
    others = [replace(card(n, 60.0), name="A100") for n in range(3)]
    assert wrong(judge(alone, peers=others)) == set()


def test_a_busy_card_is_not_hot_beside_idle_ones_and_an_idle_one_is_compared_with_nobody():
    def card(index: int, heat: float, use: float | None) -> Card:
        return Card("cuda", index, "H100", values={"temperature_c": heat, "utilization_percent": use})

    idle = [card(n, 40.0, 0.0) for n in range(1, 8)]
    busy = [card(n, 80.0, 97.0) for n in range(11, 14)]

    assert wrong(judge(Counters(NOW_S, (card(0, 80.0, 97.0), *idle)))) == set()
    assert wrong(judge(Counters(NOW_S, (card(0, 96.0, 97.0), *idle, *busy)))) == {"hotter-than-peers"}
    assert wrong(judge(Counters(NOW_S, (card(0, 75.0, 0.0), *idle)))) == set()  # it was busy a second ago
    assert wrong(judge(Counters(NOW_S, (card(0, 96.0, None), *busy)))) == set()


def of_links(*ups: float) -> Counters:
    cards = [
        Card("cuda", n, "H100", f"0000:{n:02}:00", values={"nvlinks_up": up}) for n, up in enumerate(ups)
    ]
    return Counters(NOW_S, tuple(cards), {"cuda": None})


def test_links_are_compared_with_most_cards_of_enough_and_not_with_the_one_that_has_most():
    assert wrong(judge(of_links(18, 18, 18, 17))) == {"nvlink-down"}
    assert wrong(judge(of_links(12, 12, 12, 18))) == set()
    assert wrong(judge(of_links(12, 12, 18, 18))) == set()  # two machines that are wired differently
    assert wrong(judge(of_links(12, 18))) == set()


def test_a_link_that_a_card_had_in_an_earlier_look_is_missed_in_all_later_ones():
    seen = Seen().also(of_links(18, 12))

    assert wrong(judge(of_links(18, 12), of_links(18, 12))) == set()
    assert wrong(judge(of_links(17, 12), of_links(18, 12))) == {"nvlink-down"}
    for _ in range(3):
        assert wrong(judge(of_links(17, 12), of_links(17, 12), seen=seen)) == {"nvlink-down"}
        seen = seen.also(of_links(17, 12))


def test_a_card_is_missing_only_if_an_earlier_look_has_seen_it():
    four, three = (
        look(machine(nvml=Ran(recorded(f"nvml/{name}.json"))), cuda=4)
        for name in ("h100-healthy", "h100-three-of-four")
    )
    (parts,) = [each for each in judge(three) if each.code == "card-missing"]
    (lost,) = [each for each in judge(three, three, seen=Seen().also(four)) if each.code == "card-missing"]

    assert (parts.verdict, parts.action) == ("unknown", "none")  # Ray counts parts of cards, too
    assert (lost.verdict, lost.value, lost.limit) == ("bad", 3, 4)


def test_where_one_card_is_lost_the_others_are_not_taken_for_it():
    def counters(time_s: float, *cards: tuple[int, str, float]) -> Counters:
        return Counters(
            time_s,
            tuple(Card("cuda", n, "H100", bus, values={"pcie_replays": count}) for n, bus, count in cards),
        )

    before = counters(0.0, (0, "0000:18:00", 5.0), (1, "0000:2a:00", 90_000.0))

    assert wrong(judge(counters(60.0, (0, "0000:2a:00", 90_000.0)), before)) == set()


@pytest.mark.parametrize("device", ["fd0", "sr0", "loop7", "loop7p1"])
def test_errors_of_drives_that_nobody_needs_are_no_fault_of_the_node(device):
    log = recorded("kernel/disk-many-errors.log").replace("dev sda,", f"dev {device},")
    assert f"dev {device}," in log

    assert wrong(judge(look(machine(kernel=Ran(log))))) == set()


def lines(*messages: str) -> Ran:
    return Ran("".join(f"2026-11-26T09:{10 + n}:00,000000+00:00 {each}\n" for n, each in enumerate(messages)))


def test_of_one_xid_the_worst_counts_and_of_what_a_gpu_asks_for_the_last():
    fatal = "NVRM: Xid (PCI:0000:9b:00): 145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a0c2)"
    mild = fatal.replace("Fatal", "Nonfatal")
    asks = "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset)"
    over = "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x1 (GPU Reset) to 0x0 (None)"
    switch = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20009, Fatal, Link 04 RX Short Error Rate"

    def found(*messages: str) -> Finding:
        (finding,) = judge(Counters(NOW_S, events=read_counters(machine(kernel=lines(*messages)), {}).events))
        return finding

    assert (found(fatal, mild).verdict, found(mild, fatal).verdict) == ("bad", "bad")
    assert found(fatal, mild).time_s == NOW_S - 50 * 60  # of the one that counts
    assert (found(asks, over).verdict, found(over, asks).verdict) == ("ok", "bad")
    assert found(switch, switch.replace("Fatal", "Non-fatal")).verdict == "bad"


def test_what_a_log_says_has_a_time_and_none_if_a_line_has_none():
    xid = "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."
    ends = "I/O error, dev nvme0n1, sector 1953525160 op 0x0:(READ)"

    def times(log: Ran) -> set[float | None]:
        return {each.time_s for each in judge(read_counters(machine(kernel=log), {})) if each.verdict != "ok"}

    assert times(lines(xid, ends, ends)) == {NOW_S - 50 * 60, NOW_S - 48 * 60}
    assert times(Ran(f"{xid}\n{lines(xid).output}")) == {None}


@pytest.mark.parametrize(
    ("said", "now", "time"),
    [
        ("Nov 26 09:00:00", "2026-11-26T10:00", "2026-11-26T09:00"),
        ("Dec 24 09:00:00", "2026-11-26T10:00", "2025-12-24T09:00"),
        # East of UTC, where the next month and the next year begin earlier.
        ("Feb  1 04:00:00", "2026-01-31T20:00", "2026-02-01T04:00"),
        ("Jan  1 04:00:00", "2026-12-31T20:00", "2027-01-01T04:00"),
        ("Feb 29 04:00:00", "2025-03-01T04:00", "2024-02-29T04:00"),
    ],
)
def test_a_time_without_a_year_is_of_the_last_such_day(said, now, time):
    now_s, time_s = (datetime.fromisoformat(f"{at}+00:00").timestamp() for at in (now, time))

    (event,) = parse_kernel_log(f"{said} host kernel: NVRM: Xid (PCI:0000:9b:00): 79, x", now_s, None)

    assert event.time_s == time_s


def test_a_frame_that_the_kernel_counts_as_an_error_is_one_error():
    twice = NET.replace("9537767 1 7 0 0", "9537767 9000 7 0 9000").replace(
        "8537767 0 0 0 0 0", "8537767 800 0 0 0 800"
    )
    assert twice.count("9000") == 2

    links = look(machine(files={"/proc/net/dev": twice})).links

    assert links == (Link("eth0", 9537767 + 8537767, 9800, 7),)


@pytest.mark.parametrize(
    ("sent", "clock", "received", "verdict", "skew"),
    [
        (100.0, 100.4, 101.0, "ok", 0.0),
        (100.0, 103.5, 101.0, "suspect", 2.5),
        (100.0, 95.0, 130.0, "suspect", -5.0),
        (100.0, 99.5, 130.0, "ok", -0.5),
        (100.0, 100.0, 90.0, "unknown", None),
    ],
)
def test_a_clock_is_compared_with_the_time_in_which_it_was_read(sent, clock, received, verdict, skew):
    found = clock_finding(sent, clock, received)

    assert (found.verdict, found.value) == (verdict, skew)


def test_unknown_is_never_ok_and_nothing_found_is_unknown():
    ok = Finding.of("a", "node", "ok")

    assert worst([]) == "unknown"
    assert worst([ok, Finding.of("b", "node", "unknown")]) == "unknown"
    assert worst([Finding.of("b", "node", "unknown"), Finding.of("c", "node", "suspect")]) == "suspect"
    assert AS_NUMBER["unknown"] < AS_NUMBER["ok"]


def test_the_catalog_of_xids_does_what_its_verdicts_say():
    usual = {"ok": "none", "suspect": "avoid", "bad": "leave"}

    assert all(xid.action == usual[xid.verdict] for xid in XIDS.values())
    assert len(XIDS) > 50


def test_limits_refuse_unknown_names_and_wrong_values():
    with pytest.raises(ValueError, match="greater than 0"):
        Limits(log_window_s=0)
    with pytest.raises(ValueError, match="Extra inputs"):
        Limits.model_validate({"hotter": 3})


def test_a_tool_that_hangs_is_given_up_and_one_that_lies_is_not_believed(tmp_path):
    (lies := tmp_path / "lies").write_text("#!/bin/sh\necho OK\nexit 1\n")
    (hangs := tmp_path / "hangs").write_text("#!/bin/sh\necho OK\nsleep 60 & wait\n")
    for tool in (lies, hangs):
        tool.chmod(0o755)

    assert run_command([str(lies)]) == Ran("OK\n", "ended with exit code 1")
    assert run_command([str(hangs)], limit_s=0.2) == Ran("OK\n", "did not answer in 0.2 s")
    assert run_command([str(tmp_path / "none")]) == Ran("", "is not installed")


def test_the_reader_of_nvml_answers_on_a_machine_without_a_driver():
    ran = run_command(NVML_COMMAND)

    assert ran.failure is None
    assert '"driver"' in ran.output or '"why"' in ran.output

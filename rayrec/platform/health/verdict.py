"""What counters say of a machine: one finding per check, and of them the worst is the machine's verdict.

Limits come from the cards beside it where there are enough of one model: a data sheet knows neither the room
nor the work. Where they do not, `Limits` says whose they are. What could not be read is unknown, which is
never ok.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field

from rayrec.platform.config import Config
from rayrec.platform.health.counters import Card, CardKind, Counters, Link
from rayrec.platform.health.findings import SEVERITY, Finding, Verdict, worst
from rayrec.platform.health.kernel_log import KernelEvent
from rayrec.platform.health.machine import DiskFacts, Missing
from rayrec.platform.health.xids import RECOVERY, SEVERE_BY_WORD, XIDS

__all__ = ["Limits", "Seen", "card_findings", "clock_finding", "judge", "worst"]

MIN_PEERS = 3
"""Cards of one model beside one, below which it is not compared with them."""
SLOWED_BY_FAULT = frozenset({"hw-slowdown", "hw-thermal-slowdown", "hw-power-brake", "sw-thermal-slowdown"})
"""Reasons for low clocks that are not the wish of somebody, or the power limit of ordinary work."""
HEALTH_WORDS: Mapping[str, Verdict] = {"OK": "ok", "Warning": "suspect", "Alarm": "bad", "Critical": "bad"}
"""Of npu-smi; others, also translated ones, are unknown."""


class Limits(Config):
    """Where a value turns from ok to suspect or bad."""

    log_window_s: float = Field(24 * 3600.0, gt=0)
    """Older lines of the kernel log count no more; those whose time is unknown do."""
    hotter_than_peers_c: float = Field(15.0, gt=0)
    """Above the median temperature of busy cards beside it. From peers."""
    clock_of_peers: float = Field(0.8, gt=0, le=1)
    """Of the median clock of busy cards beside it. From peers."""
    busy_percent: float = Field(50.0, ge=0, le=100)
    """Utilization from which clocks and temperatures are compared."""
    corrected_times_peers: float = Field(10.0, gt=1)
    """Corrected memory errors, times the median of the cards beside it. From peers."""
    corrected_at_least: float = Field(1000.0, ge=0)
    """Fewer are never too many. The order of magnitude at which NVIDIA reports a high rate (XID 92)."""
    pcie_replays_per_min: float = Field(8.0, gt=0)
    """NVIDIA's, in DCGM (`DCGM_LIMIT_MAX_PCIREPLAY_RATE`)."""
    nvlink_errors_per_min: float = Field(100.0, gt=0)
    """Ours: DCGM compares with bit error rates that NVML has no window of."""
    retired_pages: int = Field(60, gt=0)
    """NVIDIA's for an exchange of the card ("Dynamic Page Retirement"); also of isolated pages of an NPU."""
    corrected_memory_per_window: int = Field(100, gt=0)
    """Of the host, in the kernel log's window. Ours; about 4 an hour."""
    disk_errors: int = Field(10, gt=0)
    """In the window, from which a disk is bad. Ours."""
    link_downs: int = Field(3, gt=0)
    """In the window, from which an interface flaps. Ours."""
    free_share: float = Field(0.02, ge=0, lt=1)
    """Of a disk's bytes and inodes. Ours; Ray itself refuses objects at 5 %."""
    available_memory_share: float = Field(0.03, ge=0, lt=1)
    """Of the host. Ours; Ray ends workers at 5 %."""
    swapped_share: float = Field(0.5, gt=0, le=1)
    """Of the swap space in use. Ours."""
    lost_packets_share: float = Field(1e-3, gt=0, lt=1)
    """Errors over packets. Ours: RDMA and TCP slow down visibly from here."""
    dropped_share: float = Field(0.02, gt=0, lt=1)
    """Drops over packets, of which some are ordinary: packets for protocols that nobody reads."""
    least_packets: int = Field(10_000, gt=0)
    """With fewer there is no share of them."""
    clock_skew_s: float = Field(1.0, gt=0)
    """Ours: leases and deadlines of RayRec are in seconds."""


@dataclass(frozen=True)
class Seen:
    """The most that earlier looks have found on a machine: what is less now was lost."""

    cards: Mapping[CardKind, int] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """NVLinks that were up, by card."""

    def also(self, counters: Counters) -> Seen:
        """With one more look."""
        cards, links = dict(self.cards), dict(self.links)
        for kind in counters.expected:
            found = sum(card.kind == kind for card in counters.cards)
            cards[kind] = max(cards.get(kind, 0), found)
        for card in counters.cards:
            if (up := card.number("nvlinks_up")) is not None:
                links[_key(card)] = max(links.get(_key(card), 0.0), up)
        return Seen(cards, links)


def judge(
    counters: Counters,
    previous: Counters | None = None,
    limits: Limits | None = None,
    peers: Sequence[Card] = (),
    seen: Seen | None = None,
) -> list[Finding]:
    """Judge one look at a machine.

    Args:
        previous: an earlier look at the same machine: counts are then judged by what came since.
        peers: cards of other machines, beside which this one's are judged as well.
        seen: by all earlier looks; None knows the previous one alone.

    Returns:
        One finding per check, those of verdict `ok` among them; `worst` is the machine's verdict.
    """
    limits = limits or Limits()
    before = {} if previous is None else {_key(card): card for card in previous.cards}
    if seen is None:
        seen = Seen() if previous is None else Seen().also(previous)
    minutes = 0.0 if previous is None else max(counters.time_s - previous.time_s, 0.0) / 60
    beside = [*counters.cards, *peers]
    findings: list[Finding] = []
    for kind in counters.expected:
        findings += _of_drivers(counters, kind, seen)
    for card in counters.cards:
        others = [other for other in beside if other is not card and _alike(card, other)]
        findings += card_findings(
            card, others, limits, before.get(_key(card)), minutes, seen.links.get(_key(card))
        )
    findings += _of_kernel_log(counters, limits)
    for folder, facts in counters.disks.items():
        findings += _of_disk(folder, facts, limits)
    findings += _of_memory(counters, limits)
    findings += _of_network(counters, previous, limits)
    return findings


def clock_finding(
    sent_s: float,
    clock_s: float,
    received_s: float,
    limits: Limits | None = None,
    reference_s: float = 0.0,
) -> Finding:
    """Judge a machine's clock by another one's.

    Args:
        sent_s, received_s: times on the other clock between which the machine read its own as `clock_s`.
        reference_s: what the right time is ahead of the other clock.
    """
    limit = (limits or Limits()).clock_skew_s
    ahead_s = clock_s - reference_s
    skew_s = min(ahead_s - sent_s, 0.0) + max(ahead_s - received_s, 0.0)
    if received_s < sent_s:
        return Finding.of("clock-skew", "node", "unknown", detail="the reference clock went back meanwhile")
    verdict: Verdict = "suspect" if abs(skew_s) > limit else "ok"
    return Finding.of("clock-skew", "node", verdict, skew_s, limit)


def card_findings(
    card: Card,
    peers: Sequence[Card],
    limits: Limits,
    previous: Card | None = None,
    minutes: float = 0.0,
    most_links: float | None = None,
) -> list[Finding]:
    """Judge one card.

    Args:
        peers: others of its model.
        previous: the same card `minutes` ago.
        most_links: NVLinks of it that were ever seen up.
    """
    label = card.label
    if card.lost is not None:
        return [Finding.of("card-lost", label, "bad", detail=card.lost)]
    findings = [*_of_card_memory(card, peers, limits, previous)]
    findings += _of_card_speed(card, peers, limits)
    findings += _of_card_links(card, peers, limits, previous, minutes, most_links)
    if isinstance(card.health, str):
        verdict = HEALTH_WORDS.get(card.health, "unknown")
        detail = f"error codes {card.error_codes}" if card.error_codes else ""
        findings.append(Finding.of("driver-health", label, verdict, card.health, detail=detail))
    unread = [name for name, value in card.values.items() if isinstance(value, Missing)]
    unread += ["throttle"] if isinstance(card.throttle, Missing) else []
    if unread or not card.values:
        reasons = dict.fromkeys(
            v.why for v in (*card.values.values(), card.throttle) if isinstance(v, Missing)
        )
        detail = f"{', '.join(unread)} cannot be read: {'; '.join(reasons)}" if unread else "has no values"
        findings.append(Finding.of("card-unreadable", label, "unknown", len(unread), detail=detail))
    return findings


def _alike(card: Card, other: Card) -> bool:
    return card.kind == other.kind and card.name == other.name and other.lost is None


def _key(card: Card) -> tuple[str, str]:
    """The same in every look: where one card is lost, the others' indices move up."""
    return card.kind, card.uuid or card.bus or str(card.index)


def _of_drivers(counters: Counters, kind: CardKind, seen: Seen) -> Iterator[Finding]:
    missing, expected = counters.drivers.get(kind), counters.expected[kind]
    found = sum(card.kind == kind for card in counters.cards)
    if missing is not None:
        yield Finding.of("driver-silent", kind, "unknown", found, expected, missing.why)
    elif found < (most := seen.cards.get(kind, 0)):
        yield Finding.of("card-missing", kind, "bad", found, most, "the driver had more in an earlier look")
    elif expected is not None and found < expected:
        # Ray's number may be of parts of cards (MIG), or of what somebody has told it.
        detail = "the driver has fewer than Ray was told, and no earlier look saw more"
        yield Finding.of("card-missing", kind, "unknown", found, expected, detail)
    elif not found:
        yield Finding.of("card-missing", kind, "unknown", 0, expected, "there is a driver and no card")
    else:
        yield Finding.of("card-missing", kind, "ok", found, expected)


def _of_card_memory(
    card: Card, peers: Sequence[Card], limits: Limits, previous: Card | None
) -> Iterator[Finding]:
    label = card.label
    # Each is a statement of the card itself, with a limit of 0; NVIDIA's and DCMI's own rules.
    for name, code, verdict, detail in (
        ("ecc_uncorrected_volatile", "ecc-uncorrected", "bad", "since the driver was loaded"),
        (
            "remap_failure",
            "row-remap-failed",
            "bad",
            "the card has no spare rows left and is to be exchanged",
        ),
        ("remap_pending", "row-remap-pending", "suspect", "reset the card, so that the row is replaced"),
        ("retirement_pending", "page-retirement-pending", "suspect", "reset the card"),
    ):
        if (value := card.number(name)) is not None:
            raised: Verdict = verdict  # type: ignore[assignment]
            yield Finding.of(
                code, label, raised if value > 0 else "ok", value, 0, detail if value > 0 else ""
            )
    retired = [card.number(f"pages_retired_{bits}_bit") for bits in ("single", "double")]
    if any(count is not None for count in retired):
        count = sum(count or 0.0 for count in retired)
        verdict_of: Verdict = "bad" if count >= limits.retired_pages else "ok"
        yield Finding.of("pages-retired", label, verdict_of, count, limits.retired_pages)
    corrected = card.number("ecc_corrected_volatile")
    others = _numbers(peers, "ecc_corrected_volatile")
    if corrected is not None and len(others) >= MIN_PEERS:
        limit = max(limits.corrected_at_least, limits.corrected_times_peers * statistics.median(others))
        earlier = None if previous is None else previous.number("ecc_corrected_volatile")
        # A count that stands still is of a fault that is over.
        grows = earlier is None or corrected > earlier
        too_many: Verdict = "suspect" if corrected > limit and grows else "ok"
        yield Finding.of("ecc-corrected", label, too_many, corrected, limit)


def _of_card_speed(card: Card, peers: Sequence[Card], limits: Limits) -> Iterator[Finding]:
    label = card.label
    if isinstance(card.throttle, tuple):
        faults = sorted(SLOWED_BY_FAULT.intersection(card.throttle))
        yield Finding.of("throttled", label, "suspect" if faults else "ok", ", ".join(faults) or "no fault")
    # Work heats, and raises clocks: the busy are compared with the busy, and the idle with nobody.
    if not _is_busy(card, limits):
        return
    busy = [each for each in peers if _is_busy(each, limits)]
    heat, others = card.number("temperature_c"), _numbers(busy, "temperature_c")
    if heat is not None and len(others) >= MIN_PEERS:
        limit = statistics.median(others) + limits.hotter_than_peers_c
        yield Finding.of("hotter-than-peers", label, "suspect" if heat > limit else "ok", heat, limit)
    clock, clocks = card.number("sm_clock_mhz"), _numbers(busy, "sm_clock_mhz")
    if clock is not None and len(clocks) >= MIN_PEERS:
        limit = limits.clock_of_peers * statistics.median(clocks)
        yield Finding.of("slower-than-peers", label, "suspect" if clock < limit else "ok", clock, limit)


def _is_busy(card: Card, limits: Limits) -> bool:
    use = card.number("utilization_percent")
    return use is not None and use >= limits.busy_percent


def _of_card_links(
    card: Card,
    peers: Sequence[Card],
    limits: Limits,
    previous: Card | None,
    minutes: float,
    most_links: float | None,
) -> Iterator[Finding]:
    label = card.label
    links = card.number("nvlinks_up")
    known = [each for each in (most_links, _usual_links(card, peers)) if each is not None]
    if links is not None and known:
        most = max(known)
        yield Finding.of("nvlink-down", label, "suspect" if links < most else "ok", links, most)
    if previous is None or minutes <= 0:
        return
    for name, code, limit in (
        ("pcie_replays", "pcie-replays", limits.pcie_replays_per_min),
        ("nvlink_errors", "nvlink-errors", limits.nvlink_errors_per_min),
    ):
        now, before = card.number(name), previous.number(name)
        if now is not None and before is not None and now >= before:
            rate = (now - before) / minutes
            yield Finding.of(code, label, "suspect" if rate > limit else "ok", rate, limit)


def _usual_links(card: Card, peers: Sequence[Card]) -> float | None:
    """NVLinks that more than half of all have up, this one among them: machines may be wired differently."""
    ups = _numbers(peers, "nvlinks_up")
    if len(ups) < MIN_PEERS:
        return None
    usual = statistics.mode(ups)
    with_own = [*ups, *_numbers([card], "nvlinks_up")]
    return usual if 2 * with_own.count(usual) > len(with_own) else None


def _numbers(cards: Iterable[Card], name: str) -> list[float]:
    return [value for card in cards if (value := card.number(name)) is not None]


def _of_kernel_log(counters: Counters, limits: Limits) -> list[Finding]:
    if isinstance(counters.events, Missing):
        return [Finding.of("kernel-log", "node", "unknown", detail=counters.events.why)]
    oldest = counters.time_s - limits.log_window_s
    groups: dict[tuple[str, str, int | None], list[KernelEvent]] = defaultdict(list)
    for event in counters.events:
        if event.time_s is None or event.time_s >= oldest:
            groups[event.code, event.subject, event.number].append(event)
    by_bus = {card.bus: card.label for card in counters.cards if card.bus}
    findings: list[Finding] = []
    for (code, subject, _), events in groups.items():
        label = by_bus.get(subject.lower().partition(".")[0], subject)
        findings += _of_events(code, label, events, limits)
    return findings or [Finding.of("kernel-log", "node", "ok", 0)]


def _of_events(code: str, label: str, events: Sequence[KernelEvent], limits: Limits) -> Iterator[Finding]:
    if code in ("xid", "sxid"):
        # A later and milder one does not undo what was; only the recovery that a GPU asks for is withdrawn.
        of_each = _of_xid if code == "xid" else _of_sxid
        is_recovery = code == "xid" and events[-1].number == RECOVERY
        found = [(of_each(label, event), event) for event in (events[-1:] if is_recovery else events)]
        most = max(SEVERITY[finding.verdict] for finding, _ in found)
        worst_of = [(finding, event) for finding, event in found if SEVERITY[finding.verdict] == most]
        yield replace(worst_of[-1][0], time_s=_last_time([event for _, event in worst_of]))
        return
    for finding in _of_counted(code, label, events, limits):
        yield replace(finding, time_s=_last_time(events))


def _last_time(events: Sequence[KernelEvent]) -> float | None:
    """Of the last of them; None where one does not say when it was, which may be the last."""
    times = [event.time_s for event in events if event.time_s is not None]
    return max(times) if len(times) == len(events) else None


def _of_counted(code: str, label: str, events: Sequence[KernelEvent], limits: Limits) -> Iterator[Finding]:
    last, count = events[-1], sum(event.weight for event in events)
    verdict: Verdict
    if code == "memory-corrected":
        verdict = "suspect" if count > limits.corrected_memory_per_window else "ok"
        yield Finding.of(code, label, verdict, count, limits.corrected_memory_per_window)
    elif code == "disk-io":
        verdict = "bad" if count >= limits.disk_errors else "suspect"
        yield Finding.of(code, f"disk {label}", verdict, count, limits.disk_errors, last.line)
    elif code == "nic-down":
        verdict = "suspect" if count >= limits.link_downs else "ok"
        yield Finding.of("nic-flaps", f"network {label}", verdict, count, limits.link_downs, last.line)
    elif code == "oom-kill":
        # Too much was started there: placing less helps, leaving does not.
        yield Finding("oom-kill", label, "suspect", count, None, "none", last.line)
    elif code != "nic-up":
        yield Finding.of(code, label, _OF_EVENTS[code], count, detail=last.line)


_OF_EVENTS: Mapping[str, Verdict] = {
    "cut-off": "unknown",
    "ascend-device": "bad",
    "ascend-driver": "suspect",
    "memory-uncorrected": "bad",
    "machine-check": "suspect",
    "machine-check-fatal": "bad",
    "disk-read-only": "bad",
    "pcie-fatal": "bad",
    "lockup": "suspect",
}


def _of_sxid(label: str, event: KernelEvent) -> Finding:
    fatal = "Non-fatal" not in event.line and "Fatal" in event.line
    verdict: Verdict = "bad" if fatal else "suspect" if "Non-fatal" in event.line else "unknown"
    return Finding.of(f"sxid-{event.number}", label, verdict, event.number, detail=event.line)


def _of_xid(label: str, event: KernelEvent) -> Finding:
    assert event.number is not None, "the parser has read it"
    code = f"xid-{event.number}"
    if (xid := XIDS.get(event.number)) is None:
        detail = f"an XID that is not in the catalog: {event.line}"
        return Finding.of(code, label, "unknown", event.number, detail=detail)
    verdict, action = xid.verdict, xid.action
    if event.number in SEVERE_BY_WORD and "Nonfatal" in event.line:
        verdict, action = "suspect", "avoid"
    if event.number == RECOVERY and event.line.rstrip(" )").endswith("None"):
        verdict, action = "ok", "none"
    return Finding(code, label, verdict, event.number, None, action, f"{xid.meaning}: {event.line}")


def _of_disk(folder: str, facts: DiskFacts | Missing, limits: Limits) -> Iterator[Finding]:
    subject = f"disk of {folder}"
    if isinstance(facts, Missing):
        yield Finding.of("disk-unreadable", subject, "unknown", detail=facts.why)
        return
    if facts.is_read_only:
        yield Finding.of("disk-read-only", subject, "bad", "read-only", "writable")
        return
    for code, free, total in (
        ("disk-space", facts.free_bytes, facts.total_bytes),
        ("disk-inodes", facts.free_inodes, facts.total_inodes),
    ):
        if total > 0:
            share = free / total
            yield Finding.of(
                code, subject, "suspect" if share < limits.free_share else "ok", share, limits.free_share
            )


def _of_memory(counters: Counters, limits: Limits) -> Iterator[Finding]:
    memory = counters.memory
    if memory is None:
        return
    if isinstance(memory, Missing):
        yield Finding.of("memory-unreadable", "node", "unknown", detail=memory.why)
        return
    share, limit = memory.available / max(memory.total, 1.0), limits.available_memory_share
    yield Finding.of("memory-available", "node", "suspect" if share < limit else "ok", share, limit)
    if memory.swap_total > 0:
        used = 1 - memory.swap_free / memory.swap_total
        verdict: Verdict = "suspect" if used > limits.swapped_share else "ok"
        yield Finding.of("memory-swapped", "node", verdict, used, limits.swapped_share)


def _of_network(counters: Counters, previous: Counters | None, limits: Limits) -> Iterator[Finding]:
    if isinstance(counters.links, Missing):
        yield Finding.of("network-unreadable", "node", "unknown", detail=counters.links.why)
        return
    earlier = (
        {} if previous is None or isinstance(previous.links, Missing) else {e.name: e for e in previous.links}
    )
    for link in counters.links:
        since = _since(link, earlier.get(link.name))
        if since.packets < limits.least_packets:
            continue
        for code, count, limit in (
            ("network-errors", since.errors, limits.lost_packets_share),
            ("network-drops", since.dropped, limits.dropped_share),
        ):
            share = count / since.packets
            yield Finding.of(code, f"network {link.name}", "suspect" if share > limit else "ok", share, limit)


def _since(link: Link, before: Link | None) -> Link:
    """What came since; all of it where the interface began again."""
    if before is None or before.packets > link.packets:
        return link
    return Link(
        link.name,
        link.packets - before.packets,
        max(link.errors - before.errors, 0),
        max(link.dropped - before.dropped, 0),
    )

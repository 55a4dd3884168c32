"""Pairs of nodes that compute something together, with rotating partners, and who is common to what fails.

    round 1   A–B  C–D        A–B slow, A–C slow, A–D slow, the others fast: A
    round 2   A–C  B–D        only A–B slow: the way between them, or either
    round 3   A–D  B–C

A collective of all nodes is as slow as the slowest, and says nothing of who that is.

Source: the pairwise NCCL checks of GCM (facebookresearch/gcm) and the two-phase search of MegaScale
(arXiv:2402.15627); the schedule is the circle method for round-robin tournaments.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrec.platform.health.findings import Finding

SLOW_BELOW = 0.7
"""Share of the rate that nodes usually reach."""
MIN_PAIRS = 3
"""Measured pairs, below which there is no median to be slower than."""
PAIR_CODES = frozenset({"pair-wrong", "pair-failed", "pair-slow"})
"""Of findings. One measurement is also one of the network at that moment."""
CULPRIT_ABOVE = 0.5
"""Share of a node's pairs that are faulty; a node without a fault of its own has at most those with the few
that have one."""


@dataclass(frozen=True)
class PairResult:
    """What two nodes reached together."""

    first: str
    second: str
    bytes_per_s: float | None
    """None where it failed."""
    is_right: bool = True
    """Whether each got the numbers that it should."""
    error: str = ""


def rounds(members: Sequence[str]) -> list[list[tuple[str, str]]]:
    """A schedule in which each meets each other once, and nobody is in two pairs of a round.

    An odd number leaves one out in every round.
    """
    seats: list[str | None] = [*members, *([None] if len(members) % 2 else [])]
    schedule = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[place], seats[-1 - place]) for place in range(len(seats) // 2)]
        schedule.append([(one, other) for one, other in pairs if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return schedule


def judge_pairs(results: Sequence[PairResult]) -> dict[str, list[Finding]]:
    """Who is behind what is slow or wrong: by node, its findings.

    The one node with the largest share of faulty pairs is a culprit if that is more than half of at least
    two, and most pairs without it are well; its pairs then say nothing of its partners. Several with equal
    shares are only if none of their pairs is well, and they are fewer than the others. What remains faulty is
    the matter of two nodes, or of what is between all of them, and unknown.
    """
    names = sorted({name for result in results for name in (result.first, result.second)})
    limit = _limit(names, results)
    left = list(results)
    findings: dict[str, list[Finding]] = {}
    while culprits := _culprits(names, left, limit):
        for culprit in culprits:
            findings[culprit] = [_culprit_finding(culprit, _of(culprit, left), limit)]
        left = _without(culprits, left)
    for name in names:
        if name in findings:
            continue
        faulty = [result for result in _of(name, left) if _is_faulty(result, limit)]
        findings[name] = [_shared_finding(name, result, limit) for result in faulty] or [
            _healthy_finding(name, _of(name, left), limit)
        ]
    return findings


def _limit(names: Sequence[str], results: Sequence[PairResult]) -> float:
    """Rate below which a pair is slow; 0 where too few were measured.

    Of each node the median of its pairs, and of these the median: two culprits of seven nodes are in more
    than half of all pairs, and still only two of seven.
    """
    rates = {
        name: [each.bytes_per_s for each in _of(name, results) if each.bytes_per_s is not None]
        for name in names
    }
    if sum(map(len, rates.values())) // 2 < MIN_PAIRS:
        return 0.0
    return SLOW_BELOW * statistics.median(statistics.median(own) for own in rates.values() if own)


def _culprits(names: Sequence[str], results: Sequence[PairResult], limit: float) -> set[str]:
    """Nobody where it is open: halves that do not reach each other are as likely to be well."""
    shares: Mapping[str, float] = {
        name: sum(_is_faulty(result, limit) for result in own) / len(own)
        for name in names
        if len(own := _of(name, results)) >= 2
    }
    most = max(shares.values(), default=0.0)
    worst = {name for name, share in shares.items() if share == most}
    if most <= CULPRIT_ABOVE or (len(worst) > 1 and (most < 1.0 or 2 * len(worst) >= len(shares))):
        return set()
    others = _without(worst, results)
    num_well = sum(not _is_faulty(result, limit) for result in others)
    return worst if 2 * num_well > len(others) else set()


def _without(names: set[str], results: Sequence[PairResult]) -> list[PairResult]:
    return [result for result in results if result.first not in names and result.second not in names]


def _of(name: str, results: Sequence[PairResult]) -> list[PairResult]:
    return [result for result in results if name in (result.first, result.second)]


def _is_faulty(result: PairResult, limit: float) -> bool:
    return result.bytes_per_s is None or not result.is_right or result.bytes_per_s < limit


def _culprit_finding(name: str, own: Sequence[PairResult], limit: float) -> Finding:
    faulty = [result for result in own if _is_faulty(result, limit)]
    of_all = f"{len(faulty)} of its {len(own)} pairs"
    if not all(result.is_right for result in faulty):
        return Finding.of("pair-wrong", name, "bad", len(faulty), 0, f"{of_all} get wrong sums or none")
    if any(result.bytes_per_s is None for result in faulty):
        error = next(result.error for result in faulty if result.bytes_per_s is None)
        return Finding.of("pair-failed", name, "bad", len(faulty), 0, f"{of_all} fail: {error}")
    rate = statistics.median(result.bytes_per_s or 0.0 for result in faulty)
    return Finding.of("pair-slow", name, "suspect", rate, limit, f"{of_all} are slow")


def _shared_finding(name: str, result: PairResult, limit: float) -> Finding:
    partner = result.second if result.first == name else result.first
    code = "pair-failed" if result.bytes_per_s is None else "pair-slow" if result.is_right else "pair-wrong"
    detail = f"with {partner}, and not which of the two, or the way between them {result.error}".rstrip()
    return Finding.of(code, name, "unknown", result.bytes_per_s, limit or None, detail)


def _healthy_finding(name: str, own: Sequence[PairResult], limit: float) -> Finding:
    if not own:
        return Finding.of("pair-slow", name, "unknown", detail="all its partners have a fault of their own")
    return Finding.of(
        "pair-slow", name, "ok", min(result.bytes_per_s or 0.0 for result in own), limit or None
    )

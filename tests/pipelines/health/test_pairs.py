"""Who is behind slow or wrong pairs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from rayrec.pipelines.health.pairs import PairResult, judge_pairs, rounds
from rayrec.platform.health.findings import worst

NAMES = ["a", "b", "c", "d", "e"]


def results_of(
    names: list[str], change: Callable[[str, str], PairResult | None] = lambda one, other: None
) -> list[PairResult]:
    """All pairs at 1 GB/s, but for those that `change` gives."""
    return [change(*pair) or PairResult(*pair, 1e9) for pair in combinations(names, 2)]


def verdicts(results: list[PairResult]) -> dict[str, tuple[str, set[str]]]:
    return {
        name: (worst(findings), {finding.code for finding in findings})
        for name, findings in judge_pairs(results).items()
        if worst(findings) != "ok"
    }


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 8])
def test_everybody_meets_everybody_once_and_nobody_is_in_two_pairs_at_a_time(number):
    names = [str(member) for member in range(number)]

    schedule = rounds(names)

    met = [frozenset(pair) for pairs in schedule for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(names, 2)))
    for pairs in schedule:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
        assert len(busy) >= number - 1


def test_equal_pairs_are_ok():
    assert verdicts(results_of(NAMES)) == {}


@pytest.mark.parametrize("culprit", NAMES)
def test_the_common_member_of_slow_pairs_is_the_culprit_and_its_partners_are_not(culprit):
    slow = results_of(
        NAMES, lambda one, other: PairResult(one, other, 4e8) if culprit in (one, other) else None
    )

    assert verdicts(slow) == {culprit: ("suspect", {"pair-slow"})}


def test_wrong_sums_and_failures_are_bad():
    wrong = results_of(NAMES, lambda *pair: PairResult(*pair, 1e9, False) if "c" in pair else None)
    failing = results_of(NAMES, lambda *pair: PairResult(*pair, None, error="reset") if "c" in pair else None)

    assert verdicts(wrong) == {"c": ("bad", {"pair-wrong"})}
    assert verdicts(failing) == {"c": ("bad", {"pair-failed"})}
    assert "4 of its 4 pairs fail: reset" in judge_pairs(failing)["c"][0].detail


def test_two_culprits_are_both_found():
    wrong = results_of(
        [*NAMES, "f", "g"], lambda *pair: PairResult(*pair, 1e8) if {"a", "e"} & set(pair) else None
    )

    assert verdicts(wrong) == {name: ("suspect", {"pair-slow"}) for name in "ae"}


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8])
def test_where_all_pairs_fail_nobody_is_named(number):
    names = [str(member) for member in range(number)]

    failing = results_of(names, lambda *pair: PairResult(*pair, None, error="refused"))

    assert verdicts(failing) == {name: ("unknown", {"pair-failed"}) for name in names}


@pytest.mark.parametrize("halves", [("ab", "cd"), ("abc", "def"), ("abcd", "efgh")])
def test_halves_that_do_not_reach_each_other_have_no_culprit(halves):
    apart = results_of(
        [*"".join(halves)],
        lambda one, other: (
            PairResult(one, other, None) if (one in halves[0]) != (other in halves[0]) else None
        ),
    )

    assert verdicts(apart) == {name: ("unknown", {"pair-failed"}) for name in "".join(halves)}


def test_the_worst_of_a_cluster_in_which_little_is_well_is_not_named():
    well = {("b", "c"), ("d", "e")}
    failing = results_of(NAMES, lambda *pair: None if pair in well else PairResult(*pair, None))

    assert {verdict for verdict, _ in verdicts(failing).values()} == {"unknown"}


def test_one_slow_pair_says_not_which_of_the_two():
    slow = results_of(NAMES, lambda *pair: PairResult(*pair, 1e8) if pair == ("b", "d") else None)

    assert verdicts(slow) == {name: ("unknown", {"pair-slow"}) for name in "bd"}
    (finding,) = judge_pairs(slow)["b"]
    assert (finding.action, "with d" in finding.detail) == ("none", True)


def test_of_two_nodes_a_failure_is_unknown_and_speed_is_not_judged():
    assert verdicts([PairResult("a", "b", 1.0)]) == {}
    assert verdicts([PairResult("a", "b", None)]) == {name: ("unknown", {"pair-failed"}) for name in "ab"}
    assert judge_pairs([]) == {}

"""The order of a search, with trials that take no time: the same in whichever order they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.finalists import winner
from rayrec.pipelines.tuning.folder import Entry
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.sampling import Sampler
from rayrec.pipelines.tuning.search import Search, Tried
from rayrec.platform.errors import InputError

SPACE = {
    "x": {"kind": "float", "low": -1, "high": 1},
    "rate": {"kind": "float", "low": 1e-4, "high": 1e-1, "log": True},
    "layers": {"kind": "int", "low": 1, "high": 4},
    "loss": {"kind": "choice", "values": ["bce", {"name": "softmax", "negatives": [1, 2]}, None]},
}


def value_of(settings: dict[str, Any]) -> float:
    """Best at x = 0.3, four layers and a softmax."""
    return -((settings["x"] - 0.3) ** 2) + 0.1 * settings["layers"] + 0.5 * isinstance(settings["loss"], dict)


class Recorded:
    """Trials whose outcomes are there at once; notes in which order they were begun and asked for."""

    def __init__(self, outcome_of: Callable[[int, dict[str, Any]], Outcome]) -> None:
        self.events: list[tuple[str, int]] = []
        self.bounds: list[Any] = []
        self._outcome_of = outcome_of
        self._settings: dict[int, dict[str, Any]] = {}

    def begin(self, spec: Any) -> None:
        self.events.append(("begin", spec.number))
        self.bounds.append(spec.bounds)
        self._settings[spec.number] = spec.settings

    def outcome(self, number: int) -> Outcome:
        self.events.append(("outcome", number))
        return self._outcome_of(number, self._settings[number])


def complete(number: int, settings: dict[str, Any]) -> Outcome:
    value = value_of(settings)
    return Outcome("complete", value, (value - 1, value))


def searched(
    outcome_of: Callable[[int, dict[str, Any]], Outcome] = complete,
    before: Sequence[Entry] = (),
    space: dict[str, Any] = SPACE,
    is_larger_better: bool = True,
    num_finalists: int = 1,
    **settings: Any,
) -> tuple[Search, Recorded]:
    tuning = TuningConfig.parse(
        {"config": "run.yaml", "space": space, "trials": 30, "random_trials": 5, "seed": 3, **settings}
    )
    trials = Recorded(outcome_of)
    sampler = Sampler(tuning.space, tuning.seed, tuning.random_trials, is_larger_better)

    def spec_of(number: int, settings: dict[str, Any], bounds: Any) -> Any:
        return SimpleNamespace(number=number, settings=settings, bounds=bounds)

    def on_told(tried: Any, leading: Any) -> None:
        pass

    search = Search(tuning, is_larger_better, sampler, trials, spec_of, on_told, before, num_finalists)
    search.run()
    return search, trials


def entries(search: Search) -> list[Entry]:
    return [Entry(tried.settings, tried.outcome) for tried in search.tried]


def test_results_say_where_to_look():
    search, _ = searched(trials=40)
    random, _ = searched(trials=40, random_trials=40)

    (best,) = search.leading
    assert best.settings["layers"] == 4
    assert isinstance(best.settings["loss"], dict)
    values = [tried.outcome.value for tried in search.tried]
    assert best.outcome.value == max(values)
    late = [sum(value_of(tried.settings) for tried in each.tried[20:]) for each in (search, random)]
    assert late[0] > late[1] + 2


def test_of_losses_the_smallest_is_the_best():
    def loss(number: int, settings: dict[str, Any]) -> Outcome:
        return Outcome("complete", -value_of(settings), (-value_of(settings),))

    search, _ = searched(loss, is_larger_better=False, trials=12)

    (best,) = search.leading
    assert best.outcome.value == min(tried.outcome.value for tried in search.tried)


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_trial_begins_when_all_but_so_many_before_it_were_told(at_once):
    _, trials = searched(trials=8, at_once=at_once)

    told = 0
    for what, number in trials.events:
        if what == "begin":
            assert told == max(0, number - at_once + 1)
        else:
            assert number == told
            told += 1
    assert told == 8


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_same_seed_tries_the_same(at_once):
    first, second = (searched(at_once=at_once)[0] for _ in range(2))
    other, _ = searched(at_once=at_once, seed=4)

    assert entries(first) == entries(second)
    assert entries(first) != entries(other)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("done", [0, 1, 7, 13, 29])
def test_a_search_that_goes_on_tries_what_it_would_have_tried(at_once, done):
    def mixed(number: int, settings: dict[str, Any]) -> Outcome:
        if number % 7 == 3:
            return Outcome("failed", reason="DivergedError: step 3")
        if number % 5 == 4:
            return Outcome("pruned", -1.0, (-1.0,), "below the median")
        return complete(number, settings)

    whole, _ = searched(mixed, at_once=at_once)

    rest, trials = searched(mixed, entries(whole)[:done], at_once=at_once)

    assert entries(rest) == entries(whole)
    assert [number for what, number in trials.events if what == "begin"] == list(range(done, 30))
    assert [tried.is_new for tried in rest.tried] == [number >= done for number in range(30)]


def test_a_journal_of_another_search_is_refused():
    whole, _ = searched(trials=3)
    first, *others = entries(whole)
    changed = [Entry({**first.settings, "x": 0.123}, first.outcome), *others]

    with pytest.raises(InputError, match=r"trial 0 of the journal .* another version of Optuna"):
        searched(before=changed)


def test_settings_that_were_tried_are_not_trained_again():
    space = {"layers": {"kind": "int", "low": 1, "high": 2}}

    def by_layers(number: int, settings: dict[str, Any]) -> Outcome:
        return Outcome("complete", settings["layers"], (settings["layers"],), minutes=5.0)

    search, trials = searched(by_layers, space=space, trials=8, at_once=3)

    assert len([what for what, _ in trials.events if what == "begin"]) == 2
    for tried in search.tried:
        assert tried.outcome.value == tried.settings["layers"]
        earlier = tried.outcome.same_as
        assert (tried.outcome.minutes, earlier is None) in ((5.0, True), (0.0, False))
        assert earlier is None or search.tried[earlier].settings == tried.settings
    (best,) = search.leading
    assert best.outcome.same_as is None


def test_values_that_python_takes_for_equal_are_trials_of_their_own():
    values = [1, True, 1.0, [1], [True]]
    space = {"cache": {"kind": "choice", "values": values}}

    search, trials = searched(
        lambda number, settings: Outcome("complete", 1.0, (1.0,)), space=space, trials=30, random_trials=30
    )

    assert len([what for what, _ in trials.events if what == "begin"]) == len(values)
    begun = {str(tried.settings["cache"]) for tried in search.tried if tried.outcome.same_as is None}
    assert begun == {"1", "True", "1.0", "[1]", "[True]"}


def test_a_trial_is_held_to_what_was_told_when_it_was_begun():
    def rising(number: int, settings: dict[str, Any]) -> Outcome:
        return Outcome("complete", float(number), (number / 10, float(number)))

    _, trials = searched(rising, trials=6, at_once=2, prune={"after_trials": 2})

    # Trial 3 is begun after 0 and 1 were told, and one more each: medians of 0.0, 0.1, 0.2, ...
    assert trials.bounds[:3] == [(), (), (None,)]
    assert [bounds[0] for bounds in trials.bounds[3:]] == [0.05, 0.1, pytest.approx(0.15)]


def test_values_that_do_not_go_together_are_a_trial_that_failed():
    tuning = TuningConfig.parse({"config": "run.yaml", "space": SPACE, "trials": 4, "at_once": 2})
    trials = Recorded(complete)

    def spec_of(number: int, settings: dict[str, Any], bounds: Any) -> Any:
        if number == 1:
            raise InputError("dim=9: 9 is no multiple of 2 heads")
        return SimpleNamespace(number=number, settings=settings, bounds=bounds)

    search = Search(
        tuning, True, Sampler(tuning.space, 0, 4, True), trials, spec_of, lambda tried, best: None
    )
    search.run()

    outcomes = [tried.outcome for tried in search.tried]
    assert [outcome.state for outcome in outcomes] == ["complete", "failed", "complete", "complete"]
    assert outcomes[1].reason == "dim=9: 9 is no multiple of 2 heads"


def test_no_best_without_a_trial_that_is_complete():
    search, _ = searched(lambda number, settings: Outcome("failed", reason="no"), trials=4)

    assert search.leading == []


def test_importances_are_of_what_decides(tmp_path: Path):
    tuning = TuningConfig.parse({"config": "run.yaml", "space": {key: SPACE[key] for key in ("x", "rate")}})
    sampler = Sampler(tuning.space, 0, 40, True)
    for number in range(40):
        settings = sampler.ask()
        if number == 5:
            assert sampler.importances() == {}
        sampler.tell(number, Outcome("complete", -abs(settings["x"])))

    shares = sampler.importances()

    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["x"] > 0.9


def test_leading_trials_are_the_best_complete_ones_that_differ():
    space = {"layers": {"kind": "int", "low": 1, "high": 4}}

    def by_layers(number: int, settings: dict[str, Any]) -> Outcome:
        return Outcome("complete", settings["layers"])

    search, _ = searched(by_layers, space=space, num_finalists=2, begin_with_config=False)
    assert [tried.settings["layers"] for tried in search.leading] == [4, 3]


def test_the_trial_of_the_config_is_a_finalist():
    def by_number(number: int, settings: dict[str, Any]) -> Outcome:
        return Outcome("complete", float(number))

    search, _ = searched(by_number, trials=8, num_finalists=2)
    assert [tried.number for tried in search.leading] == [7, 6, 0]
    alone, _ = searched(by_number, trials=8)
    assert [tried.number for tried in alone.leading] == [7]


@pytest.mark.parametrize(("is_larger_better", "expected"), [(True, 1), (False, 2)])
def test_the_winner_is_the_best_of_those_that_were_judged(is_larger_better, expected):
    leading = [Tried(number, {}, Outcome("complete", 0.5), True) for number in range(4)]

    assert winner(leading, {1: 0.3, 2: 0.1, 3: 0.3}, is_larger_better).number == expected
    assert winner(leading, {}, is_larger_better).number == 0

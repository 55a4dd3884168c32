"""Which action each request gets, by value and price."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.inference.answers import Budget
from rayrec.platform.errors import InputError
from rayrec.serve.app.allocator import shares_by, values_of
from rayrec.serve.config.allocation import AllocateConfig
from rayrec.serve.engine.allocation import TICK_S, Allocator, Facts, draw_of, text_bits
from rayrec.serve.engine.degradation import NOT_DEGRADED, DegradationLevel, combined
from rayrec.serve.engine.value_curves import ActionKey, ValueCurves
from rayrec.serve.wire.schemas import ModelInfo

MODEL = ModelInfo(run="run", step=3)
ACTIONS = (
    {"name": "full"},
    {"name": "half", "max_beams": 10},
    {"name": "few", "max_beams": 5, "max_events": 20},
    {"name": "popular", "popular": True},
)
COSTS = [0.01, 0.008, 0.006, 0.0005]
SHARES = [1.0, 0.93, 0.8, 0.0]


class World:
    """A clock, and a device that works off what was chosen."""

    def __init__(self, **settings):
        self.now, self.backlog_s = 100.0, 0.0
        config = AllocateConfig(**{"actions": ACTIONS, "curves": "curves.json", **settings})
        self.allocator = Allocator(
            config,
            lambda model, num_events: None if model.run != "run" else SHARES,
            lambda: COSTS,
            lambda: max(self.backlog_s - 0.05, 0.0),
            lambda: self.now,
        )

    def ask(self, value=1.0, user="u", draw=2**63, model=MODEL, num_events=10, **facts):
        header = None if value is None else str(value)
        return self.allocator.decide(Facts(user, num_events, draw, **facts), header, model)

    def set_price(self, price):
        self.allocator.price.value = price

    def run(self, seconds, load, random, most_backlog_s=0.4):
        """(Device seconds of each second, decisions) of Poisson arrivals; too many of them are refused."""
        began, spent, decisions = self.now, np.zeros(seconds), []
        while self.now < began + seconds:
            gap = random.exponential(COSTS[0] / load)
            self.now, self.backlog_s = self.now + gap, max(self.backlog_s - gap, 0.0)
            if self.now >= began + seconds:
                break
            if self.backlog_s > most_backlog_s:
                self.allocator.refused(1)
                continue
            user, draw = f"u{random.integers(5000)}", int(random.integers(2**63)) * 2
            decisions.append(self.ask(random.pareto(1.5) + 0.1, user, draw))
            cost = COSTS[[each["name"] for each in ACTIONS].index(decisions[-1].action)]
            self.backlog_s += cost
            spent[int(self.now - began)] += cost
        return spent, decisions


@given(
    value=st.floats(0, 1e6),
    price=st.floats(1e-6, 1e9),
)
def test_a_request_gets_the_action_that_is_worth_most_beyond_its_price(value, price):
    world = World(explore=0.0, floor_every=0)
    world.set_price(price)

    decision = world.ask(value)

    gains = [value * share - price * cost for share, cost in zip(SHARES, COSTS, strict=True)]
    assert gains[[each["name"] for each in ACTIONS].index(decision.action)] == max(gains)
    assert (decision.value, decision.price, decision.propensity) == (value, price, 1.0)


def test_an_action_becomes_a_degradation_level():
    world = World(explore=0.0, floor_every=0)
    world.set_price(100.0)
    levels = {decision.action: decision.level for decision in map(world.ask, np.geomspace(0.01, 1e3, 200))}

    assert levels["full"] == NOT_DEGRADED
    assert levels["few"] == DegradationLevel(Budget(max_beams=5, max_events=20))
    assert levels["popular"] == DegradationLevel(asks_model=False)


def test_while_the_device_has_time_nobody_gets_less():
    world, random = World(), np.random.default_rng(0)

    _, decisions = world.run(20, 0.5, random)

    assert {(each.action, each.reason, each.propensity) for each in decisions} == {("full", "full", 1.0)}
    assert world.allocator.metrics()["allocation_price"] == 0.0


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_after_a_step_the_load_is_that_of_the_budget_and_stays_there(load):
    world, random = World(explore=0.0), np.random.default_rng(1)
    world.run(10, 0.5, random)

    spent, _ = world.run(25, load, random)

    # A second has a hundred to three hundred requests: their number alone varies by several percent.
    assert spent[5:].mean() == pytest.approx(0.85, rel=0.05)
    halves = spent[5:].reshape(-1, 5).mean(1)
    assert np.abs(halves / 0.85 - 1).max() < 0.1
    assert world.backlog_s < 0.2


def test_power_goes_where_it_is_worth_more():
    world, random = World(explore=0.0, floor_every=0), np.random.default_rng(2)
    world.run(10, 2.0, random)

    _, decisions = world.run(10, 2.0, random)

    by_action = {
        name: [each.value for each in decisions if each.action == name] for name in ("full", "popular")
    }
    assert np.mean(by_action["full"]) > 5 * np.mean(by_action["popular"])


def test_when_the_load_is_gone_everybody_gets_everything_again():
    world, random = World(), np.random.default_rng(3)
    world.run(8, 3.0, random)
    assert world.allocator.price.value > 0

    world.run(8, 0.4, random)

    _, decisions = world.run(2, 0.4, random)
    assert {each.action for each in decisions} == {"full"}


def test_every_user_gets_full_effort_in_one_of_so_many_requests():
    world = World(explore=0.0, floor_every=10)
    world.set_price(1e9)
    users = [f"user {number}" for number in range(200)]

    draws = {user: draw_of(text_bits(user), 0) for user in users}
    asked = {
        user: [world.ask(1e-9, user, draws[user]).reason == "floor" for _ in range(55)] for user in users
    }

    for is_floor in asked.values():
        assert all(sum(is_floor[first : first + 10]) == 1 for first in range(46))
    # Not all of a crowd of new users at once.
    assert 5 < sum(is_floor[0] for is_floor in asked.values()) < 60


def test_exploration_has_the_propensities_that_it_says():
    world = World(explore=0.2, floor_every=0)
    world.set_price(200.0)
    draws = [draw_of(text_bits(str(number)), 0) for number in range(20_000)]

    decisions = [world.ask(1.5, draw=draw) for draw in draws]

    counts = Counter(each.action for each in decisions)
    propensities = {each.action: each.propensity for each in decisions}
    assert sum(propensities.values()) == pytest.approx(1.0)
    for action, propensity in propensities.items():
        assert counts[action] / len(draws) == pytest.approx(propensity, abs=0.01)
    # Inverse propensities give what any other policy would have earned: here, full effort for all.
    served = [each.value * SHARES[0] / each.propensity for each in decisions if each.action == "full"]
    assert sum(served) / len(draws) == pytest.approx(1.5, rel=0.1)
    assert world.ask(1.5, draw=draws[7]).action == decisions[7].action


@pytest.mark.parametrize("header", ["nan", "-1", "inf", "-inf", "many", "", "1e999"])
def test_a_value_that_is_none_leads_to_full_effort_and_is_counted(header, caplog):
    world = World(explore=0.0, floor_every=0)
    world.set_price(1e6)

    decisions = [world.ask(header) for _ in range(3)]

    assert {(each.action, each.reason, each.value) for each in decisions} == {("full", "bad_value", None)}
    assert world.allocator.metrics()["allocation_decisions_bad_value_total"] == 3
    assert caplog.text.count("computed as a whole") == 1


def test_a_model_without_curves_is_asked_for_everything(caplog):
    world = World(explore=0.0, floor_every=0)
    world.set_price(1e6)

    decision = world.ask(0.001, model=ModelInfo(run="other", step=9))

    assert (decision.action, decision.reason) == ("full", "no_curve")
    assert "rayrec value-curves" in caplog.text


@pytest.mark.parametrize("jump_s", [-3600.0, 86_400.0 * 365])
def test_a_clock_that_jumps_does_no_harm(jump_s):
    world, random = World(explore=0.0), np.random.default_rng(4)
    world.run(8, 2.0, random)

    world.now += jump_s
    world.ask()

    assert world.allocator.price.value == 0.0
    spent, _ = world.run(12, 2.0, random)
    assert spent[6:].mean() == pytest.approx(0.85, rel=0.08)
    assert world.allocator.num_clock_jumps == (jump_s < 0)


def test_what_is_refused_raises_the_price_too():
    prices = []
    for refused in (0, 50):
        world = World(explore=0.0)
        for _ in range(10):
            for _ in range(9):
                world.ask()
            world.allocator.refused(refused)
            world.now += TICK_S
        prices.append(world.allocator.price.value)
    assert prices[1] > 2 * prices[0]


def test_values_come_from_the_header_else_the_segment_else_the_last_answers():
    world = World(explore=0.0, floor_every=0)
    allocator = Allocator(
        world.allocator.config,
        lambda model, num_events: SHARES,
        lambda: COSTS,
        lambda: 0.0,
        lambda: 0.0,
        {"ann": 7.0},
        {"i1": 10.0, "i2": 2.0},
    )

    def value_of(user, header=None):
        return allocator.decide(Facts(user, 3, 0), header, MODEL).value

    assert value_of("ann", "3") == 3.0
    assert value_of("ann") == 7.0
    assert value_of("bob") == 1.0
    allocator.learn("bob", [("i1", np.log(0.3)), ("i2", np.log(0.1)), ("i3", np.log(0.1))])
    assert value_of("bob") == pytest.approx(0.6 * 10 + 0.2 * 2 + 0.2 * 1)
    assert value_of(None) == 1.0


def test_of_two_levels_the_less_of_each_holds():
    less = DegradationLevel(Budget(max_beams=5, max_events=30), ranks=False)
    other = DegradationLevel(Budget(max_beams=8, max_events=10), takes_cached=True)

    assert combined(NOT_DEGRADED, less) == combined(less, NOT_DEGRADED) == less
    assert combined(less, other) == DegradationLevel(
        Budget(max_beams=5, max_events=10), ranks=False, takes_cached=True
    )
    for first, second in itertools.permutations((less, other, NOT_DEGRADED), 2):
        assert combined(first, second) == combined(second, first)


def curves(*keys):
    return ValueCurves("run@3", keys, (20,), np.linspace(0.5, 0.9, 2 * len(keys)).reshape(2, -1))


def test_curves_hold_for_the_later_versions_of_their_run():
    config = AllocateConfig(actions=ACTIONS, curves="curves.json")
    found = shares_by(curves(ActionKey(10), ActionKey(5, 20)), config.actions, "curves.json")

    assert found(ModelInfo(run="run", step=99), 5) == pytest.approx([1.0, 0.5, 0.5 + 0.4 / 3, 0.0])
    assert found(ModelInfo(run="run", step=3), 20)[1] > 0.7
    assert found(ModelInfo(run="another", step=3), 5) is None


def test_an_action_that_was_not_measured_is_told_at_the_start():
    config = AllocateConfig(actions=ACTIONS, curves="curves.json")
    with pytest.raises(InputError, match=r"nothing of the action 'few'.*rayrec value-curves"):
        shares_by(curves(ActionKey(10)), config.actions, "curves.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user_key,worth\na,1\n", "no column 'value'"),
        ("user_key,value\na,1\nb,-2\n", "line 3: value is -2"),
        ("user_key,value\na,1\nb,\n", "line 3: value is None"),
    ],
)
def test_a_table_of_values_that_cannot_be_used_is_told_at_the_start(text, message, tmp_path):
    (tmp_path / "values.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        values_of(str(tmp_path / "values.csv"), "user_key")


def test_values_are_read_by_key(tmp_path):
    (tmp_path / "values.csv").write_text("user_key,value\n007,1.5\nbob,2\n")
    assert values_of(str(tmp_path / "values.csv"), "user_key") == {"007": 1.5, "bob": 2.0}


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([{"name": "full"}, {"name": "full", "max_beams": 3}], "two actions are called 'full'"),
        ([{"name": "few", "max_beams": 3}, {"name": "full"}], "'few', has to compute everything"),
        ([{"name": "full"}, {"name": "p", "popular": True, "max_beams": 3}], "leave out its max_beams"),
        ([{"name": "full"}], "at least 2"),
        ([{"name": "full"}, {"name": "Too Few"}], "pattern"),
    ],
)
def test_actions_that_make_no_sense_are_refused(actions, message):
    with pytest.raises(ValueError, match=message):
        AllocateConfig(actions=actions, curves="curves.json")


def test_value_is_served_when_the_answer_comes():
    world = World(explore=0.0, floor_every=0)
    answered, refused, _ = [world.ask(3.0), world.ask(2.0), world.ask(1.0)]

    world.allocator.answered(answered)
    world.allocator.took_nothing(refused)

    assert (world.allocator.value_asked, world.allocator.value_served) == (6.0, 3.0)


def load_after(world, note):
    """Of one tick, in which requests were decided and `note` was told of each."""
    for _ in range(20):
        note(world.ask())
    world.now += 2 * TICK_S
    return world.allocator.metrics()["allocation_load"]


def test_what_took_nothing_is_not_charged():
    whole = load_after(World(), lambda decision: None)
    world = World()
    assert load_after(world, world.allocator.took_nothing) == pytest.approx(0.0)
    world = World()
    assert load_after(world, lambda each: world.allocator.answered(each, was_there=True)) == pytest.approx(
        0.0
    )
    world = World()
    assert load_after(world, world.allocator.answered) == whole > 0


NEAR_LINE = ({"name": "full"}, {"name": "near", "near_line": True, "max_beams": 5}, *ACTIONS[1:3])


def test_a_near_line_answer_costs_what_it_takes_to_compute_those_that_are_missing():
    world = World(explore=0.0, floor_every=0, actions=NEAR_LINE)
    world.set_price(300.0)
    assert world.ask().action == "near"  # tried, as long as nothing is known

    for _ in range(200):
        world.allocator.answered(world.ask(1.0), was_there=False)
    world.now += 2 * TICK_S
    world.ask()
    world.set_price(300.0)
    missing = world.ask()
    for _ in range(2000):
        world.now += 2 * TICK_S
        world.set_price(300.0)
        world.ask()
    world.set_price(300.0)

    assert missing.action != "near"
    assert world.ask().action == "near"  # tried again


def crowded_out(world, room_taken, values, draws):
    """Share that finds no room, of requests of some value after many of all values."""
    refused = []
    for value, draw in zip(values, draws, strict=True):
        refused.append(world.allocator.room_for(str(value), int(draw), room_taken) == "none")
    return np.array(refused)


def test_the_less_room_is_left_the_more_a_request_has_to_be_worth():
    world, random = World(explore=0.0, floor_every=0), np.random.default_rng(7)
    values, draws = random.pareto(1.16, 2000) + 1, random.integers(2**63, size=2000)

    assert not crowded_out(world, 0.8, values, draws).any()
    for taken, share in ((0.85, 0.25), (0.95, 0.75)):
        refused = crowded_out(world, taken, values, draws)[600:]
        assert refused.mean() == pytest.approx(share, abs=0.05)
        assert values[600:][refused].max() < 1.5 * values[600:][~refused].min()
    assert crowded_out(world, 1.5, values, draws)[600:].mean() == pytest.approx(0.95, abs=0.02)


def test_of_requests_that_are_worth_the_same_as_many_are_refused():
    world, draws = World(explore=0.0, floor_every=0), np.random.default_rng(8).integers(2**63, size=1000)
    refused = crowded_out(world, 0.88, np.ones(1000), 2 * draws.astype(object))
    assert refused.mean() == pytest.approx(0.4, abs=0.05)


def test_room_is_decided_once_and_what_is_refused_takes_nothing_but_raises_the_price():
    world = World(explore=0.0, floor_every=0)
    for _ in range(10):
        world.ask(5.0, room_taken=0.1)

    refused = world.ask(1.0, room_taken=0.9)

    assert refused.is_refused
    assert (refused.seconds, refused.served) == (0.0, 0.0)
    assert not world.ask(1.0, room_taken=0.9, room="value").is_refused
    assert world.allocator.metrics()["allocation_decisions_no_room_total"] == 1
    for _ in range(20):
        for _ in range(30):
            world.ask(1.0, room_taken=0.9)
        world.now += 2 * TICK_S
    assert world.allocator.price_now > 0


def test_a_header_that_says_nothing_of_the_value_leaves_it_to_the_request():
    world = World()
    assert [world.allocator.room_for(header, 0, 0.99) for header in (None, "nan", "-1")] == [None] * 3


def test_a_users_turn_for_full_effort_is_not_refused():
    world = World(explore=0.0, floor_every=5)
    reasons = Counter(world.ask(1.0, draw=2**62, room_taken=0.999).reason for _ in range(50))
    assert reasons == {"no_room": 40, "full": 10}
    draws = [draw_of(text_bits(str(number)), 0) for number in range(500)]
    rooms = Counter(world.allocator.room_for("1", draw, 1.0) for draw in draws)
    assert rooms["floor"] / rooms["none"] == pytest.approx(1 / 4, rel=0.3)
    world.set_price(1e6)
    assert world.ask(1e-6, room="floor").reason == "floor"


@pytest.mark.parametrize("value", [1e300, 1e9, 1e6])
def test_one_request_that_is_worth_a_lot_does_not_make_the_others_worth_nothing(value):
    world, random = World(explore=0.0), np.random.default_rng(5)
    world.run(8, 1.5, random)

    world.ask(value)

    _, decisions = world.run(4, 1.5, random)
    assert np.mean([each.action == "popular" for each in decisions]) < 0.6
    assert np.isfinite(world.allocator.price.value)
    assert np.isfinite(world.allocator.value_asked)


def test_a_request_that_takes_more_costs_more():
    world = World(explore=0.0, floor_every=0)
    world.set_price(50.0)
    usual, dear = (world.allocator.decide(Facts("u", 5, 2**63, scale), "2", MODEL) for scale in (1.0, 20.0))
    assert (usual.action, dear.action) == ("full", "popular")
    assert dear.seconds == pytest.approx(20 * COSTS[3])


def test_users_who_are_forgotten_and_requests_of_nobody_have_their_turn_too(monkeypatch):
    monkeypatch.setattr("rayrec.serve.engine.allocation.MOST_USERS", 50)
    world = World(explore=0.0, floor_every=10)
    world.set_price(1e9)
    floors = Counter()
    for turn in range(60):
        for user in [*(f"user {number}" for number in range(60)), None]:
            draw = draw_of(text_bits(f"{user} {turn}"), 0)
            floors[user] += world.ask(1e-9, user, draw).reason == "floor"
    assert all(0 < floors[user] < 20 for user in [*(f"user {number}" for number in range(60)), None])


def asked_for_a_second(world, random, room_taken, by_chance=0.0):
    """(Values, which of them found no room) of 20 requests in each of ten ticks."""
    values, refused = random.pareto(1.16, 200) + 1, []
    for number, value in enumerate(values):
        world.now += TICK_S / 20
        if random.random() < by_chance:
            world.allocator.left_to_chance()
        refused.append(world.ask(value, draw=int(random.integers(2**63)), room_taken=room_taken).is_refused)
        assert number < 200
    return values, np.array(refused)


def test_those_of_least_value_make_room_while_others_are_refused_by_chance():
    world, random = World(explore=0.0, floor_every=0), np.random.default_rng(6)
    shares = [asked_for_a_second(world, random, 0.5, by_chance=0.6)[1].mean() for _ in range(6)]
    assert shares[0] < 0.3
    assert shares == sorted(shares)
    values, refused = asked_for_a_second(world, random, 0.5, by_chance=0.3)
    assert refused.mean() > 0.9
    assert values[refused].max() < 2 * values[~refused].min()
    assert world.allocator.price.value > 0, "less is computed before more is refused"

    for _ in range(5):
        _, refused = asked_for_a_second(world, random, 0.1)
    assert not refused.any()


def test_after_a_while_without_requests_nobody_is_refused():
    world, random = World(explore=0.0, floor_every=0), np.random.default_rng(6)
    for _ in range(5):
        asked_for_a_second(world, random, 0.5, by_chance=0.6)
    world.now += 30.0
    world.allocator.tick()
    assert not asked_for_a_second(world, random, 0.5)[1].any()

"""Computing power by value: which action each request gets, by a price of the device's time.

    request ─► value v ──────────────────────────────┐
    curves ──► share m_j of what full effort finds ──┼─► argmax_j  v · m_j − λ · c_j ─► degradation level
    costs ───► device seconds c_j ───────────────────┘                   ▲
                                   c_j of what was chosen ─► load ─► price λ, every 100 ms

With a price on a second of the device, choosing for each request alone solves the problem for all: most value
for a budget of time (the Lagrangian of the linear program; DCAF, arXiv:2006.09684). The price is found while
requests come, by dual mirror descent (Balseiro, Lu and Mirrokni, arXiv:2011.10124):

    λ ← λ · exp(η · (load / budget − 1))

The load is the device time that the chosen actions take per second, in batches of the best size, and what has
piled up besides. It is not the time that the device is seen to be busy: one that computes requests one at a
time is always busy, and could take many more. While the load is below the budget the price falls, and becomes
0: then everybody gets full effort.

Room for requests in flight may be what is short instead: reading and writing takes time, too, and a price
of the device does not mend that. While more than a part of it is taken, or requests find none at all, more
and more of those that are worth least beside those of late are refused. What is refused is charged, so that
less is computed for each before fewer are answered.

Whatever is not known, a value, a curve, the time, leads to full effort and a counter. Degradation levels
remain as the emergency brake.

Axes: A actions.
"""

from __future__ import annotations

import logging
import math
import threading
import zlib
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rayrec.pipelines.inference.answers import Budget
from rayrec.platform.hashing import combine64
from rayrec.serve.config.actions import ActionConfig
from rayrec.serve.config.allocation import AllocateConfig
from rayrec.serve.engine.degradation import NOT_DEGRADED, DegradationLevel
from rayrec.serve.wire.schemas import ModelInfo

logger = logging.getLogger(__name__)

TICK_S = 0.1
RATE = 0.15
"""η of a tick."""
MOST_ERROR = 2.0
"""Of load / budget - 1, that counts in a tick: the price multiplies by at most exp(0.3)."""
LONGEST_GAP_S = 60.0
"""Without a request; nothing is concluded of a longer time, nor of one in which the clock went back."""
BACKLOG_S = 2.0
"""Time in which what has piled up is to be worked off."""
FULL = 0.8
"""Share of the room for requests in flight, above which those of least value are refused at once."""
ROOM_TAKEN, CROWDING = 0.8, 0.1
"""Mean share of the room that may be taken, and how much more of the requests of least value are refused from
tick to tick, for each 1 that it is above: in a burst, there has to be room for those of most value."""
MOST_TICKS = 10.0
"""For which a request's word on the room counts."""
MOST_CROWDED_OUT = 0.95
"""Share of requests, those of least value, that is refused before there is no room at all."""
LEAST_PRICE, MOST_PRICE = 0.05, 10.0
"""Times the mean value of a device second: a price below is none, and none is above."""
MOST_OF_USUAL = 10.0
"""Times the usual value of a request, as which one that is worth more counts for the scale of prices: one
request must not make all others worth nothing."""
SMOOTHING = 0.2
"""Weight of a tick in the mean value and the load that is shown."""
MOST_USERS = 100_000
"""Whose requests are counted and values kept; of others, the least recently seen are forgotten."""
WARN_EVERY_S = 60.0

FORGETTING = 0.999
"""From tick to tick, of how many near-line answers were missing: else an action that has seemed dear would
not be tried again."""
WEIGHT_OF_ANSWER = 0.02
"""In the share of near-line answers that were missing."""

Reason = Literal["full", "price", "floor", "explore", "bad_value", "no_curve", "no_room"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class Decision:
    """What a request gets."""

    action: str
    level: DegradationLevel
    value: float | None
    """None where none could be used."""
    price: float
    """Value per device second, when it was decided."""
    propensity: float | None
    """Probability with which a request like this one got the action; None where a degradation level held,
    too, so that something else was computed."""
    reason: Reason
    served: float
    """Of the value, what the action finds."""
    seconds: float
    """Of the device, that it is expected to take."""

    @property
    def is_refused(self) -> bool:
        """There is little room left, and others are worth more."""
        return self.reason == "no_room"

    @property
    def columns(self) -> dict[str, object]:
        """For the request log."""
        return {
            "action": self.action,
            "propensity": self.propensity,
            "value": self.value,
            "price": self.price,
        }


@dataclass(frozen=True)
class Facts:
    """What decisions depend on, besides the value."""

    user_key: str | None
    num_events: int
    draw: int
    """64 random bits of the request, equal for the same request."""
    cost_scale: float = 1.0
    """Times the device seconds of a usual request that it takes, whatever its action: it wants more items."""
    room_taken: float = 0.0
    """Share of the room for requests, or of the time that this one may wait, that others take. 0 where it may
    not be refused for that."""
    room: Room | None = None
    """That it was found to have by its header alone; None: not looked at."""


Room = Literal["value", "floor", "none"]
"""For a request: since it is worth enough, since it is a user's turn, or none."""

Curves = Callable[[ModelInfo, int], Sequence[float] | None]
"""[A] the share of what full effort finds, by the model that answers and the number of a user's events; None:
not known."""


class ValueRanks:
    """Where a value stands among those of late."""

    def __init__(self, most: int = 512) -> None:
        """
        Args:
            most: values that are kept.
        """
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []
        self._most = most

    def add(self, value: float) -> None:
        self._newest.append(value)
        insort(self._sorted, value)
        if len(self._newest) > self._most:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]

    def of(self, value: float, draw: float) -> float:
        """Share of the values that are less, and of equal ones by `draw`, from 0 to 1: else requests of which
        all are worth the same would all be refused at once."""
        first, last = bisect_left(self._sorted, value), bisect_right(self._sorted, value)
        return (first + draw * (last - first)) / max(len(self._sorted), 1)


class Price:
    """Of a second of the device."""

    def __init__(self, budget: float) -> None:
        """
        Args:
            budget: share of the time that the device may be busy.
        """
        self.budget = budget
        self.value = 0.0
        self._scale = 0.0
        """Mean value of a device second at full effort."""
        self.load = 0.0
        """Smoothed."""

    def update(self, load: float, worth: float | None, num_ticks: float) -> None:
        """Move the price after some ticks.

        Args:
            load: device seconds per second.
            worth: value over device seconds of what came, at full effort; None: nothing came.
        """
        if worth is not None:
            weight = SMOOTHING if self._scale else 1.0
            self._scale += weight * (worth - self._scale)
        self.load += (1 - (1 - SMOOTHING) ** num_ticks) * (load - self.load)
        least, most = LEAST_PRICE * self._scale, MOST_PRICE * self._scale
        if not self.value:
            # By chance, many requests come within one tick: that is no lack yet.
            if self.load <= self.budget:
                return
            self.value = least
        error = min(load / self.budget - 1, MOST_ERROR)
        # What is worth less than before brings the price down at once.
        self.value = min(self.value * math.exp(RATE * error * num_ticks), most)
        if error <= 0 and self.value < least:
            self.value = 0.0


class Allocator:
    """Decides for one request after the other; from any thread. The clock and all else is given."""

    def __init__(
        self,
        config: AllocateConfig,
        curves: Curves,
        costs: Callable[[], Sequence[float]],
        backlog_s: Callable[[], float],
        clock: Callable[[], float],
        values_of_users: Mapping[str, float] | None = None,
        values_of_items: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            costs: [A] device seconds of a request in a batch of the best size, as known now; of a near-line
                answer, where it is missing.
            backlog_s: device seconds of what waits, beyond what a batch or two take.
        """
        self.config, self._curves = config, curves
        self._costs_of_now, self._backlog_s, self._clock = costs, backlog_s, clock
        self._values_of_users, self._values_of_items = values_of_users or {}, values_of_items or {}
        self._levels = [level_of(action) for action in config.actions]
        self._names = [action.name for action in config.actions]
        self._missing = [0.0 if action.near_line else 1.0 for action in config.actions]
        """Share of an action's answers that have to be computed. Near-line answers are taken to be there
        until they are seen not to be: an action that seems dear would never be tried."""
        self._costs = self._expected_costs()
        # Metrics are read by other threads, and move the price as requests do.
        self._lock = threading.RLock()
        self.price = Price(config.busy)
        self._usual_value = config.value.default
        self._ranks = ValueRanks()
        self._crowded_out = 0.0
        """Share of requests, those of least value, that is refused now."""
        self._rooms_taken: list[float] = []
        """Since the last tick, as requests found it."""
        self._num_by_chance = 0
        """Since the last tick, requests that found no room or were not answered in time, whatever they are
        worth."""
        self._ticked_at = clock()
        self._spent_s = self._worth = self._whole_s = 0.0
        """Since the last tick: device seconds of what was chosen, value that came, and device seconds that it
        would take at full effort."""
        self._num_decided = self._num_refused = 0
        """Since the last tick."""
        self._usual_s = self._costs[0]
        """Device seconds of a request of the last tick."""
        self._seen: OrderedDict[str, int] = OrderedDict()
        """Requests of each user."""
        self._expected: OrderedDict[str, float] = OrderedDict()
        """Value of a user's requests, by the last answers."""
        self._warned_at = float("-inf")
        self.num_actions = dict.fromkeys(self._names, 0)
        self.num_reasons = dict.fromkeys(REASONS, 0)
        self.num_clock_jumps = 0
        self.value_served = self.value_asked = 0.0

    def decide(self, facts: Facts, header: str | None, model: ModelInfo) -> Decision:
        """The action for a request that is about to be computed.

        Args:
            header: what the request says that it is worth; None: nothing.
            model: that answers.
        """
        with self._lock:
            return self._decide(facts, header, model)

    def _decide(self, facts: Facts, header: str | None, model: ModelInfo) -> Decision:
        self.tick()
        is_floor = self._is_floor(facts) or facts.room == "floor"
        value = self._value_of(facts.user_key, header)
        found = self._curves(model, facts.num_events)
        scale = facts.cost_scale
        if value is None or found is None:
            reason: Reason = "bad_value" if value is None else "no_curve"
            self._warn(reason)
            return self._decided(0, value, 1.0, reason, 1.0, scale)
        is_crowded_out = facts.room is None and self._is_crowded_out(value, facts.room_taken, facts.draw)
        if is_crowded_out and not is_floor:
            self.refused(1)
            return self._decided(0, value, None, "no_room", 0.0, scale)
        if not self.price.value:
            return self._decided(0, value, 1.0, "full", found[0], scale)
        greedy = self._best(value, found, scale)
        reason = "price" if greedy else "full"
        if is_floor:
            greedy, reason = 0, "floor"
        explore, num_actions = self.config.explore, len(self._names)
        chosen, draw = greedy, facts.draw / 2.0**64
        if draw < explore:
            chosen = int(draw / explore * num_actions)
            reason = "explore" if chosen != greedy else reason
        propensity = explore / num_actions + (1 - explore) * (chosen == greedy)
        return self._decided(chosen, value, propensity, reason, found[chosen], scale)

    def room_for(self, header: str | None, draw: int, room_taken: float) -> Room | None:
        """Decide on room by a request's header alone: to read its body takes longer than all else of a
        refusal.

        Args:
            draw: 64 random bits. Whose turn it is for full effort is not known yet, and falls to one in so
                many by chance.
            room_taken: as in `Facts`.

        Returns:
            None: the header says nothing of the value.
        """
        with self._lock:
            value = None if header is None else self._value_of(None, header)
            if value is None:
                return None
            if not self._is_crowded_out(value, room_taken, draw):
                return "value"
            if (every := self.config.floor_every) and draw_of(draw, every) % every == 0:
                return "floor"
            self.refused(1)
            self.num_reasons["no_room"] += 1
            self.value_asked += value
            return "none"

    def _is_crowded_out(self, value: float, room_taken: float, draw: int) -> bool:
        """Whether a request is among those of least value, which are the more the less room is left."""
        self._ranks.add(value)
        self._rooms_taken.append(room_taken)
        # What is worth most is let through: whether there is any room is not said here.
        least = max(self._crowded_out, min((room_taken - FULL) / (1 - FULL), MOST_CROWDED_OUT))
        return least > 0 and self._ranks.of(value, draw / 2.0**64) < least

    def _best(self, value: float, shares: Sequence[float], cost_scale: float) -> int:
        """The first of the best actions by value minus price."""
        price, best, most = self.price.value * cost_scale, 0, -math.inf
        for action, (share, cost) in enumerate(zip(shares, self._costs, strict=True)):
            if (gain := value * share - price * cost) > most:
                best, most = action, gain
        return best

    def _decided(
        self,
        action: int,
        value: float | None,
        propensity: float | None,
        reason: Reason,
        share: float,
        cost_scale: float,
    ) -> Decision:
        name, seconds = self._names[action], cost_scale * self._costs[action]
        self.num_reasons[reason] += 1
        if reason == "no_room":
            seconds = 0.0
        else:
            self.num_actions[name] += 1
            self._num_decided += 1
            self._spent_s += seconds
        self._whole_s += cost_scale * self._costs[0]
        served = 0.0 if value is None else value * share
        if value is not None:
            counted = min(value, MOST_OF_USUAL * self._usual_value)
            self._usual_value += 0.01 * (counted - self._usual_value)
            self._worth += counted
            self.value_asked += value
        level, price = self._levels[action], self.price.value
        return Decision(name, level, value, price, propensity, reason, served, seconds)

    def answered(self, decision: Decision, was_there: bool = False) -> None:
        """Take down that a request has its answer.

        Args:
            was_there: it was computed before the request.
        """
        with self._lock:
            self.value_served += decision.served
            action = self._names.index(decision.action)
            if self.config.actions[action].near_line:
                missing = 0.0 if was_there else 1.0
                self._missing[action] += WEIGHT_OF_ANSWER * (missing - self._missing[action])
            elif was_there:
                self.took_nothing(decision)

    def took_nothing(self, decision: Decision) -> None:
        """Take down that a request was refused for what it says, or withdrawn. One whose deadline has passed
        has taken the room of others: what it was charged stays."""
        with self._lock:
            self._spent_s = max(self._spent_s - decision.seconds, 0.0)

    def refused(self, count: int) -> None:
        """Take down requests that there was no room for: the price has to rise for them, too."""
        with self._lock:
            self.tick()
            self._num_refused += count
            self._spent_s += count * self._usual_s

    def left_to_chance(self, count: int = 1) -> None:
        """Take down requests that found no room, or were not answered in time, whatever they are worth:
        others that are worth less have to make it."""
        with self._lock:
            self._num_by_chance += count

    def tick(self) -> None:
        """Move the price by what has come since, if a tick is over."""
        with self._lock:
            self._tick()

    def _tick(self) -> None:
        now = self._clock()
        passed_s = now - self._ticked_at
        if 0 <= passed_s < TICK_S:
            return
        self._ticked_at = now
        if passed_s < 0 or passed_s > LONGEST_GAP_S:
            # A clock that was set, or a night without requests: what piles up now will show.
            self.num_clock_jumps += passed_s < 0
            self.price.value = 0.0
        else:
            load = self._spent_s / passed_s + self._backlog_s() / BACKLOG_S
            worth = self._worth / self._whole_s if self._whole_s and self._worth else None
            self.price.update(load, worth, passed_s / TICK_S)
        self._crowd_out(min(abs(passed_s), LONGEST_GAP_S) / TICK_S)
        if self._num_decided:
            self._usual_s = self._spent_s / (self._num_decided + self._num_refused)
        self._spent_s = self._worth = self._whole_s = 0.0
        self._num_decided = self._num_refused = 0
        for action, config in enumerate(self.config.actions):
            if config.near_line:
                self._missing[action] *= FORGETTING
        self._costs = self._expected_costs()

    def _crowd_out(self, num_ticks: float) -> None:
        """Refuse more or fewer of the requests of least value."""
        count = max(len(self._rooms_taken), 1)
        taken = min(math.fsum(self._rooms_taken) / count, 1.0)
        by_chance = min(self._num_by_chance / count, 1.0)
        # Of a long time without requests, what was seen before it says nothing.
        more = CROWDING * ((taken + by_chance) * min(num_ticks, MOST_TICKS) - ROOM_TAKEN * num_ticks)
        self._crowded_out = min(max(self._crowded_out + more, 0.0), MOST_CROWDED_OUT)
        self._rooms_taken.clear()
        self._num_by_chance = 0

    def _expected_costs(self) -> list[float]:
        return [share * cost for share, cost in zip(self._missing, self._costs_of_now(), strict=True)]

    def _is_floor(self, facts: Facts) -> bool:
        """Whether it is the user's turn to get everything.

        Users begin at a number by chance: else a crowd of new ones would all be computed as a whole, and one
        who was forgotten never.
        """
        if not (every := self.config.floor_every):
            return False
        begins_at = draw_of(facts.draw, every) % every
        if facts.user_key is None:
            return begins_at == 0
        number = self._seen.pop(facts.user_key, begins_at - 1) + 1
        self._seen[facts.user_key] = number
        while len(self._seen) > MOST_USERS:
            self._seen.popitem(last=False)
        return number % every == 0

    def _value_of(self, user_key: str | None, header: str | None) -> float | None:
        """None: what the header says is no value."""
        if header is not None:
            try:
                value = float(header)
            except ValueError:
                return None
            return value if 0 <= value <= self.config.value.most else None
        if user_key is not None:
            for values in (self._values_of_users, self._expected):
                if (known := values.get(user_key)) is not None:
                    return known
        return self.config.value.default

    def learn(self, user_key: str | None, items: Sequence[tuple[str, float]]) -> None:
        """Take down what a user's answer is worth.

        Args:
            items: of the model, keys and log-probabilities.
        """
        if user_key is None or not self._values_of_items or not items:
            return
        best = max(score for _, score in items)
        weights = [math.exp(score - best) for _, score in items]
        worth = sum(
            weight * self._values_of_items.get(key, self.config.value.default)
            for weight, (key, _) in zip(weights, items, strict=True)
        )
        before = self._expected.pop(user_key, None)
        value = worth / sum(weights)
        self._expected[user_key] = value if before is None else before + 0.3 * (value - before)
        while len(self._expected) > MOST_USERS:
            self._expected.popitem(last=False)

    def _warn(self, reason: Reason) -> None:
        if (now := self._clock()) - self._warned_at < WARN_EVERY_S and now >= self._warned_at:
            return
        self._warned_at = now
        if reason == "bad_value":
            logger.warning(
                "a request says in %s that it is worth no number from 0 to %g; it is computed as a whole, "
                "and counted as rayrec_allocation_decisions_bad_value_total",
                self.config.value.header,
                self.config.value.most,
            )
        else:
            logger.warning(
                "the model that answers has no curves in %s; requests are computed as a whole, and counted "
                "as rayrec_allocation_decisions_no_curve_total; make them with `rayrec value-curves`",
                self.config.curves,
            )

    @property
    def price_now(self) -> float:
        """Of a second of the device."""
        self.tick()
        return self.price.value

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        self.tick()
        return {
            "allocation_price": self.price.value,
            "allocation_load": self.price.load,
            "allocation_budget": self.price.budget,
            "allocation_value_asked_total": self.value_asked,
            "allocation_value_served_total": self.value_served,
            "allocation_clock_jumps_total": self.num_clock_jumps,
            **{f"allocation_actions_{name}_total": count for name, count in self.num_actions.items()},
            **{f"allocation_decisions_{name}_total": count for name, count in self.num_reasons.items()},
        }


def level_of(action: ActionConfig) -> DegradationLevel:
    """What an action computes."""
    if action.is_full:
        return NOT_DEGRADED
    return DegradationLevel(
        Budget(max_beams=action.max_beams, max_events=action.max_events),
        ranks=action.rank,
        asks_model=not action.popular,
        takes_cached=action.near_line,
    )


def text_bits(text: str) -> int:
    """Bits of a text, the same in every process."""
    return zlib.crc32(text.encode(errors="replace"))


def draw_of(*parts: int) -> int:
    """64 random bits of what a request is told by."""
    return int(combine64(*(part & (2**64 - 1) for part in parts)))

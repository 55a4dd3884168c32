"""How many replicas of a service answer a rate of requests in time, by what batches were measured to take.

    requests ─► the replica with fewest in flight ─► a batch of what waits, as soon as the model is free

A service of c replicas whose batches have n requests is an M/G/c queue of batches: rate / n batches a second,
each of s(n) seconds. Batches grow with the load, so of all sizes the one with the shortest answers is what a
replica comes to; its tail is exponential. That is where the search begins. It ends with the service simulated
request by request, since a replica's requests wait for its own batch even if another replica is free, which
M/G/c leaves out.

Sources: Allen & Cunneen's approximation for M/G/c (A. O. Allen, Probability, Statistics, and Queueing Theory,
1990); Erlang's C formula.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.platform.errors import InputError

TAIL = 0.01
"""Share of answers that may take longer than the bound."""
VARIATION = 0.2
"""Of a batch's time, standard deviation over mean, where none is given."""
MOST_REPLICAS = 100_000
NUM_REQUESTS = 30_000
"""That are simulated: the slowest hundredth of them are 300."""


@dataclass(frozen=True)
class ReplicaPlan:
    """Replicas for a rate."""

    replicas: int
    by_formula: int
    """Replicas that M/G/c says."""
    p50_s: float
    p99_s: float
    mean_batch: float
    utilization: float
    """Share of the time that a replica computes."""
    most_rate: float
    """Requests per second that so many replicas can answer at all, with the best batches."""


def plan_replicas(
    seconds_by_size: Mapping[int, float],
    rate: float,
    p99_s: float,
    variation: float = VARIATION,
    num_requests: int = NUM_REQUESTS,
) -> ReplicaPlan:
    """The fewest replicas with which 99 % of the answers are given in time.

    Args:
        seconds_by_size: what batches take, measured at some sizes, 1 among them (see `BatchCosts`).
        rate: requests per second.
        p99_s: within which 99 of 100 answers are to be given.
        variation: of a batch's time, standard deviation over mean.
        num_requests: that are simulated.

    Raises:
        InputError: a single request takes longer than that, or costs are not those of batches.
    """
    costs = _table(seconds_by_size)
    if rate <= 0 or p99_s <= 0:
        raise InputError(
            f"a rate of {rate:g} requests a second within {1000 * p99_s:g} ms: both have to be above 0"
        )
    alone = costs[1] * (1 + _QUANTILE * variation)
    if alone > p99_s:
        raise InputError(
            f"a single request takes {1000 * alone:.1f} ms at its 99th percentile, more than "
            f"{1000 * p99_s:.1f} ms: no number of replicas is enough; use a faster model, "
            "fewer beams, or a later deadline"
        )
    guess = fewest(lambda replicas: mgc_answer_s(costs, rate, replicas, variation) <= p99_s)
    best = max(n / costs[n] for n in range(1, len(costs)))
    seen: dict[int, SimulatedReplicas] = {}

    def is_enough(replicas: int) -> bool:
        # The simulated time may be too short for a queue that grows for good to show in the answers.
        if replicas * best <= rate:
            return False
        seen[replicas] = simulate_replicas(seconds_by_size, rate, replicas, num_requests, variation)
        return seen[replicas].p99_s <= p99_s

    found = fewest(is_enough, guess)
    answers = seen[found]
    return ReplicaPlan(
        found, guess, answers.p50_s, answers.p99_s, answers.mean_batch, answers.utilization, found * best
    )


def fewest(is_enough: Callable[[int], bool], guess: int = 1) -> int:
    """The least number that is enough, where more are enough, too.

    Raises:
        InputError: not even `MOST_REPLICAS` are.
    """
    low, high = 0, guess
    while not is_enough(high):
        low, high = high, 2 * high
        if high > MOST_REPLICAS:
            raise InputError(
                f"more than {MOST_REPLICAS:,} replicas would be needed; the deadline is too early"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


_QUANTILE = 2.326
"""Standard deviations to the 99th percentile of a normal distribution."""


def _table(seconds_by_size: Mapping[int, float]) -> list[float]:
    """Seconds of every size from 1, on straight lines between those measured; index 0 is unused."""
    sizes = sorted(seconds_by_size)
    if not sizes or sizes[0] != 1 or any(seconds_by_size[size] <= 0 for size in sizes):
        raise InputError("costs of batches have to begin with size 1, and to be above 0")
    found = np.interp(np.arange(1, sizes[-1] + 1), sizes, [seconds_by_size[size] for size in sizes])
    return [0.0, *found.tolist()]


def mgc_answer_s(costs: Sequence[float], rate: float, replicas: int, variation: float) -> float:
    """99th percentile of answers with so many replicas; infinite where they are too few.

    Args:
        costs: seconds of a batch by its size, from 0 on.
    """
    best = math.inf
    for size in range(1, len(costs)):
        service = costs[size]
        load = rate / size * service  # in replicas
        if load < replicas:
            wait = waiting_quantile_s(load, replicas, service, variation)
            best = min(best, wait + service * (1 + _QUANTILE * variation))
    return best


def waiting_quantile_s(load: float, replicas: int, service_s: float, variation: float) -> float:
    """99th percentile of the wait in an M/G/c queue.

    Args:
        load: arrivals per second times seconds of each, less than the replicas.
        variation: of the service time, standard deviation over mean.
    """
    chance = erlang_c(load, replicas)
    if chance <= TAIL:
        return 0.0
    mean = (1 + variation**2) / 2 * service_s / (replicas - load)
    return mean * math.log(chance / TAIL)


def erlang_c(load: float, servers: int) -> float:
    """Chance that an arrival waits, in M/M/c; by Erlang's B recursion, which does not overflow."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    utilization = load / servers
    return blocked / (1 - utilization * (1 - blocked))


@dataclass(frozen=True)
class SimulatedReplicas:
    """Answers of a simulated service."""

    p50_s: float
    p99_s: float
    mean_batch: float
    utilization: float


def simulate_replicas(
    seconds_by_size: Mapping[int, float],
    rate: float,
    replicas: int,
    num_requests: int = NUM_REQUESTS,
    variation: float = VARIATION,
    seed: int = 0,
) -> SimulatedReplicas:
    """The service request by request: the same seed gives the same answers.

    A request goes to the replica with the fewest in flight; a replica that is free computes all that wait, up
    to the largest batch that was measured.
    """
    costs = _table(seconds_by_size)
    most = len(costs) - 1
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, num_requests)).tolist()
    waiting: list[list[float]] = [[] for _ in range(replicas)]
    in_flight = [0] * replicas
    # Replicas by what is in flight, with lazy deletion; and the ends of batches.
    order = [(0, replica) for replica in range(replicas)]
    ends: list[tuple[float, int, list[float]]] = []
    answers: list[float] = []
    batches, busy_s, ended_s = 0, 0.0, 0.0
    is_busy = [False] * replicas
    spread = math.sqrt(math.log(1 + variation**2))

    def start(replica: int, now: float) -> None:
        nonlocal batches, busy_s, ended_s
        batch, waiting[replica] = waiting[replica][:most], waiting[replica][most:]
        seconds = costs[len(batch)] * math.exp(spread * random.standard_normal() - spread**2 / 2)
        batches, busy_s, ended_s = batches + 1, busy_s + seconds, max(ended_s, now + seconds)
        is_busy[replica] = True
        heapq.heappush(ends, (now + seconds, replica, batch))

    def finish(until: float) -> None:
        while ends and ends[0][0] <= until:
            now, replica, batch = heapq.heappop(ends)
            answers.extend(now - arrived for arrived in batch)
            in_flight[replica] -= len(batch)
            heapq.heappush(order, (in_flight[replica], replica))
            is_busy[replica] = False
            if waiting[replica]:
                start(replica, now)

    for now in arrivals:
        finish(now)
        while order[0][0] != in_flight[order[0][1]]:
            heapq.heappop(order)
        replica = heapq.heappop(order)[1]
        in_flight[replica] += 1
        heapq.heappush(order, (in_flight[replica], replica))
        waiting[replica].append(now)
        if not is_busy[replica]:
            start(replica, now)
    finish(math.inf)
    kept = np.array(answers[num_requests // 10 :])  # the first found an empty service
    return SimulatedReplicas(
        float(np.quantile(kept, 0.5)),
        float(np.quantile(kept, 0.99)),
        num_requests / batches,
        busy_s / replicas / ended_s,
    )

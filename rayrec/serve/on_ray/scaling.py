"""One controller of a service's replicas: a minimum, a maximum, and between them what the load asks for.

    settings: min_replicas, max_replicas ─┐
    queue: a lower maximum, at once ──────┼─► target ─► Ray Serve's external scaling
    batchers' own load ──┐                │
    requests in flight ──┤                │
    price of a second ───┴─► wish ────────┘   one of the three decides, as the settings say
                              raised at once, lowered when the load was low for a while

Several that scale one deployment would undo each other's work. So Ray Serve's own autoscaling is off, and who
wants something else says it here: the queue that needs the room lowers the maximum, and never the minimum.

A dead band and two waits keep the wish from going up and down: the one for new replicas to come up, during
which requests pile up before the old ones, and the time for which the load has to be low. That time doubles
each time that it was too short (the load came back soon after). The Horizontal Pod Autoscaler of Kubernetes
has the dead band ("tolerance"), the time ("stabilization window") and the bound on a step as well. Replicas
that were added since requests waited are kept while like work comes: work alone would take them away again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from rayrec.pipelines.cluster.service_limits import ReplicaState, ServiceLimits
from rayrec.platform.metrics import RayMetrics
from rayrec.serve.config.scaling import BatcherTargets, ScalingConfig
from rayrec.serve.engine.batch_load import BatcherLoad

logger = logging.getLogger(__name__)

LONGEST_GAP_S = 60.0
"""Without a look at the load, after which nothing is concluded of what was seen before."""
MOST_STEP = 2.0
"""Times the replicas that there are, to which they are raised or of which they are lowered at once."""
MOST_PATIENCE = 8.0
"""Times `lower_after_s`, that the load has to be low where it came back each time."""
CHEAP = 0.5
"""Share of what a second of a replica has to earn: where it earns less, one replica fewer would do."""
LEAST_WORK = 0.1
"""Share of the work that a replica is for: where less comes, what waits would wait with any number of
replicas, and more are not added for it."""
REMEMBERED = 24.0
"""Times `lower_after_s`, for which it is remembered with how many replicas requests waited: then fewer are
tried again, since it may have been a stall."""
ROUNDING = 1e-9
WARN_EVERY_S = 60.0
TELL_EVERY_S = 5.0
"""What others read of the state, if nothing changes."""
REPLICA_METRICS = (
    "service_replicas",
    "service_replicas_target",
    "service_replicas_wish",
    "service_replicas_maximum",
    "service_replicas_needed",
)
"""By deployment: those that exist, the numbers that `ReplicaState` has, and what load needs, not rounded, of
the average that the wish is made of; 0 where it is not known."""


class ServeDownError(Exception):
    """Ray's dashboard does not answer, or not now: it is asked again."""


class ServeRefusedError(ServeDownError):
    """It answers that the request cannot be served: to ask the same again helps only if somebody mends it."""


@dataclass(frozen=True)
class Bounds:
    """Of the replicas of one deployment."""

    least: int
    most: int


@dataclass(frozen=True)
class Load:
    """Of one deployment, at one moment."""

    in_flight: float | None
    """Requests, over all replicas; None, or not a finite number: not known."""
    is_complete: bool = True
    """All replicas have said theirs; else there are at least so many."""
    price: float | None = None
    """What a further device second would earn; None, or not a finite number: not known."""
    batchers: tuple[BatcherLoad, ...] = ()
    """Of those replicas that have said theirs."""
    num_running: int = 0
    """Replicas that answer."""

    def needs(self, targets: BatcherTargets) -> dict[str, float]:
        """Replicas, not rounded, by each part of the batchers' signal; empty where none has said its own.

        Work is all that comes, so that it says how few would do. The others say of the replicas that there
        are how much too few they are, in proportion, and nothing of how few would do: nobody waits for a
        replica that is half full. They say nothing of replicas that are hardly asked.
        """
        if not self.batchers:
            return {}
        num = len(self.batchers)
        work = math.fsum(each.work for each in self.batchers) / targets.work
        if work < LEAST_WORK * num:
            return {"work": work}
        per_replica = {
            "queue wait": math.fsum(each.queue_wait_s for each in self.batchers) / targets.queue_wait_s,
            "full batches": math.fsum(each.full_batches for each in self.batchers) / targets.full_batches,
            "backlog": math.fsum(each.backlog_s for each in self.batchers) / targets.backlog_s,
        }
        return {"work": work, **{name: need for name, need in per_replica.items() if need > num}}


@dataclass(frozen=True)
class Deployed:
    """One deployment as Ray Serve has it."""

    target: int
    nodes: tuple[str, ...]
    """Address of the node of every replica, those that start and those that end included."""
    running: tuple[str, ...]
    """Ids of the replicas that answer."""
    node_ids: tuple[str, ...] = ()
    """Ray's, of the same replicas as `nodes`."""


class WaitMemory:
    """With how many replicas requests have waited, by the work that came."""

    def __init__(self, kept_s: float, band: float) -> None:
        """
        Args:
            band: share of the work, by which less is still like it.
        """
        self._kept_s, self._band = kept_s, band
        self._waited: list[tuple[float, float, int]] = []
        """(When, work, the least number of replicas with which they may not wait)."""

    def waited(self, now: float, work: float, num_running: int) -> None:
        least = num_running + 1
        self._waited = [
            each
            for each in self._waited
            if now - each[0] <= self._kept_s and not (self._is_like(each[1], work) and each[2] <= least)
        ]
        self._waited.append((now, work, least))

    def least(self, now: float, work: float) -> int:
        """Replicas that such work needs for nobody to wait, as far as it is known; 0 where it is not."""
        return max(
            (
                least
                for at, seen, least in self._waited
                if now - at <= self._kept_s and self._is_like(work, seen)
            ),
            default=0,
        )

    def _is_like(self, work: float, seen: float) -> bool:
        """What waits with some work waits with more."""
        return work >= seen * (1 - self._band)


class Wish:
    """How many replicas the load of one deployment asks for. Pure: the time is an argument, in seconds."""

    def __init__(
        self, bounds: Bounds, settings: ScalingConfig, begin: int, requests: float | None = None
    ) -> None:
        """
        Args:
            begin: replicas to begin with.
            requests: in flight, that one replica is for; None: by the signal of the batchers, unless a
                second of a replica has a price.
        """
        self._bounds, self._settings, self._requests = bounds, settings, requests
        self._targets = settings.targets if requests is None else None
        self.replicas = min(max(begin, bounds.least), bounds.most)
        self._seen: deque[tuple[float, float, float]] = deque()
        """Of late: when, what was in flight, or the price, or needed, and what of that the work needed."""
        self._waits = WaitMemory(REMEMBERED * settings.lower_after_s, settings.dead_band)
        self._needs: deque[tuple[float, float]] = deque()
        """Since when the wish is what it is, or of late: when, and how many replicas were needed."""
        self.needed = 0.0
        """Replicas, not rounded, by the average of late."""
        self.why = "requests in flight" if settings.worth_of_replica_s is None else "price"
        """What asked for most of late."""
        self._raised_at = -math.inf
        self._lowered_at: float | None = None
        """None where it was raised since."""
        self._patience = 1.0

    def observe(self, now: float, load: Load, num_running: int) -> int:
        """Take in what is seen now, and return the wish. What is not known changes nothing."""
        value, work, is_complete = self._value(load)
        if value is None or not math.isfinite(value) or value < 0:
            return self.replicas
        if self._seen and not 0 <= now - self._seen[-1][0] <= LONGEST_GAP_S:
            self._seen.clear()
            self._needs.clear()
        self._seen.append((now, value, work))
        while self._seen[0][0] < now - self._settings.average_s:
            self._seen.popleft()
        need = self._need(math.fsum(each for _, each, _ in self._seen) / len(self._seen))
        band, wish = self._settings.dead_band, self.replicas
        work = math.fsum(each for _, _, each in self._seen) / len(self._seen)
        has_waited = need > wish * (1 + band) >= work
        if (kept := self._waits.least(now, work) * (1 - band)) > need:
            need, self.why = kept, "requests waited at such work"
        self.needed = need
        if need > wish * (1 + band) and wish < self._bounds.most:
            # Requests that wait for replicas which are coming up are counted again and again.
            if num_running >= wish or now - self._raised_at >= self._settings.raise_again_s:
                if has_waited and self._targets is not None:
                    most_work = max(each for _, _, each in self._seen)  # the average is late where it rises
                    self._waits.waited(now, most_work, min(num_running, wish))
                self._raise(now, need)
            else:
                self._needs.append((now, need))
            return self.replicas
        if not is_complete:
            return self.replicas
        self._needs.append((now, need))
        quiet_s = self._settings.lower_after_s * self._patience
        while len(self._needs) > 1 and self._needs[1][0] <= now - quiet_s:
            self._needs.popleft()
        if now - self._needs[0][0] >= quiet_s:
            fewer = math.ceil(max(need for _, need in self._needs) / (1 - band) - ROUNDING)
            if fewer < wish and wish > self._bounds.least:
                self._lower(now, fewer)
        return self.replicas

    def _value(self, load: Load) -> tuple[float | None, float, bool]:
        """(What is averaged: a need by the batchers, the price, or what is in flight; what work alone needs,
        0 where it does not decide; whether it is of all replicas)."""
        if self._targets is not None:
            needs = load.needs(self._targets)
            if not needs:
                return None, 0.0, False
            self.why = max(needs, key=lambda name: needs[name])
            return needs[self.why], needs["work"], len(load.batchers) >= load.num_running > 0
        value = load.in_flight if self._settings.worth_of_replica_s is None else load.price
        return value, 0.0, load.is_complete

    def _need(self, value: float) -> float:
        """Replicas, not rounded, by the average of what `_value` takes."""
        if self._targets is not None:
            return value
        worth, band = self._settings.worth_of_replica_s, self._settings.dead_band
        if worth is None:
            assert self._requests is not None, "else the batchers' signal decides"
            return value / self._requests
        if value > worth * (1 + band):
            return (self.replicas + 1) * (1 + band)
        # One fewer has to be below the wish by the dead band, too.
        return (self.replicas - 1) * (1 - band) if value < CHEAP * worth else float(self.replicas)

    def _raise(self, now: float, need: float) -> None:
        if self._lowered_at is not None:
            was_soon = now - self._lowered_at < 2 * self._settings.lower_after_s * self._patience
            self._patience = min(2 * self._patience, MOST_PATIENCE) if was_soon else 1.0
            self._lowered_at = None
        most = max(self.replicas + 1, math.floor(MOST_STEP * self.replicas))
        worth = self._settings.worth_of_replica_s
        # How much a second of the one after the next would earn is not known.
        self._change(min(math.ceil(need), most) if worth is None else self.replicas + 1)
        self._raised_at = now

    def _lower(self, now: float, fewer: int) -> None:
        self._change(max(fewer, math.ceil(self.replicas / MOST_STEP)))
        self._lowered_at = now

    def _change(self, replicas: int) -> None:
        self.replicas = min(max(replicas, self._bounds.least), self._bounds.most)
        self._needs.clear()


def within(bounds: Bounds, wish: int, left: int | None) -> tuple[int, int]:
    """The target, and the maximum that is in force.

    Args:
        left: maximum that somebody else leaves; None: no other than that of the bounds.
    """
    maximum = bounds.most if left is None else max(bounds.least, min(bounds.most, left))
    return max(bounds.least, min(wish, maximum)), maximum


class ServeClient(Protocol):
    """Ray Serve from outside. All raise `ServeDownError` where there is no answer."""

    def deployments(self, application: str) -> Mapping[str, Deployed]:
        """By name; empty if there is no such application."""

    def loads(self, application: str, deployments: Mapping[str, Deployed]) -> Mapping[str, Load]:
        """By name."""

    def scale(self, application: str, deployment: str, replicas: int) -> None:
        """Let a deployment have so many replicas; returns before it has."""


@dataclass(frozen=True)
class Scaled:
    """One deployment that is scaled."""

    bounds: Bounds
    begin: int
    requests_per_replica: float | None
    """None: the signal of the batchers, or the price, decides."""
    settings: ScalingConfig


class ReplicaController:
    """Keeps the deployments of one application at what is wished for and allowed."""

    def __init__(
        self,
        application: str,
        scaled: Mapping[str, Scaled],
        client: ServeClient,
        limits: ServiceLimits,
        publish: Callable[[str, Mapping[str, float]], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            scaled: by name of the deployment.
            publish: metrics of a deployment.
        """
        self._application, self._scaled = application, dict(scaled)
        self._client, self._limits, self._publish = client, limits, publish
        self._clock, self._wall_clock = clock, wall_clock
        self._wishes = {
            name: Wish(each.bounds, each.settings, each.begin, each.requests_per_replica)
            for name, each in scaled.items()
        }
        self._looked_at = -math.inf
        self._told: dict[str, tuple[float, ReplicaState]] = {}
        self._warned: dict[str, float] = {}

    @property
    def tick_s(self) -> float:
        return min(each.settings.tick_s for each in self._scaled.values())

    def tick(self) -> None:
        """Look and scale once. Where Ray does not answer, all stays as it is."""
        try:
            deployments = self._client.deployments(self._application)
            there = {name: each for name, each in deployments.items() if name in self._scaled}
            self._apply(there)  # a lower maximum does not wait for the metrics
            look_s = min(each.settings.look_s for each in self._scaled.values())
            if there and self._clock() - self._looked_at >= look_s:
                self._looked_at = self._clock()
                loads = self._client.loads(self._application, there)
                for name, each in there.items():
                    load = loads.get(name, Load(None))
                    self._wishes[name].observe(self._clock(), load, len(each.running))
                self._apply(there)
        except ServeDownError as error:
            self._warn("down", "replicas stay as they are: %s", error)

    def close(self) -> None:
        """The service ends in order, and with it what it was left."""
        for name in self._scaled:
            self._limits.forget(self._application, name)

    def _apply(self, deployments: Mapping[str, Deployed]) -> None:
        for name, each in deployments.items():
            bounds, wish = self._scaled[name].bounds, self._wishes[name].replicas
            limit = self._limits.limit(self._application, name)
            if limit is not None and limit.maximum < bounds.least:
                self._warn(
                    name,
                    "%s: it is left %d replicas, and has at least its min_replicas, %d",
                    name,
                    limit.maximum,
                    bounds.least,
                )
            target, maximum = within(bounds, wish, None if limit is None else limit.maximum)
            if target != each.target:
                why = f"as load is ({self._wishes[name].why})"
                if target != wish and limit is not None:
                    why = limit.why or "as it is left no more"
                logger.info("%s: %d replicas instead of %d, %s", name, target, each.target, why)
                self._client.scale(self._application, name, target)
            self._tell(
                name,
                ReplicaState(self._wall_clock(), len(each.nodes), target, wish, maximum, each.node_ids),
            )

    def _tell(self, name: str, state: ReplicaState) -> None:
        told_at, told = self._told.get(name, (-math.inf, None))
        if (
            told is not None
            and replace(told, at=state.at) == state
            and self._clock() - told_at < TELL_EVERY_S
        ):
            return
        numbers = (state.num_replicas, state.target, state.wish, state.maximum, self._wishes[name].needed)
        self._told[name] = self._clock(), state
        self._limits.report(state, self._application, name)
        self._publish(name, dict(zip(REPLICA_METRICS, map(float, numbers), strict=True)))

    def _warn(self, about: str, text: str, *values: object) -> None:
        if self._clock() - self._warned.get(about, -math.inf) >= WARN_EVERY_S:
            self._warned[about] = self._clock()
            logger.warning(text, *values)


@contextmanager
def controlled(controller: ReplicaController | None) -> Iterator[None]:
    """Inside the block, a thread of this process scales; None: nothing is to be scaled."""
    if controller is None:
        yield
        return
    stopped = threading.Event()

    def work() -> None:
        while not stopped.wait(controller.tick_s):
            try:
                controller.tick()
            except Exception:  # of one tick; without the thread, a maximum would not be kept any more
                logger.exception("replicas stay as they are")

    thread = threading.Thread(target=work, name="replicas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        controller.close()


class DeploymentMetrics:
    """Publishes by deployment, through Ray's metrics."""

    def __init__(self) -> None:
        self._metrics: dict[str, RayMetrics] = {}

    def __call__(self, deployment: str, metrics: Mapping[str, float]) -> None:
        self._metrics.setdefault(deployment, RayMetrics({"deployment": deployment})).publish(metrics)

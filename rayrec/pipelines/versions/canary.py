"""A new version gets a share of the requests, and is taken back or promoted by what becomes of them.

    start ─► canary.json ─► replicas load it beside the version that serves, and give it a share of the users
                             └► canary/ID/counts-*.json: what each has counted ─► judged, by all together
                                    ├ worse ─────► canary/ID/end.json: returned, with the reason
                                    └ no worse ──► canary/ID/end.json: promoted ─► the pointer moves

All is in the store, so replicas need not know each other. Each of them judges all counts by the same rule.
The first to write the end has the last word in a folder; of two that write at once to an object store, the
last one. So the end is read back before the pointer moves, and an end without its effect is completed by
who looks next. While a canary runs, the version that serves is held: the one that it is compared with
must not change.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import ConfigDict, Field

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.versions.canary_counts import MOST_USERS, CanaryCounts, OtherFormatError
from rayrec.pipelines.versions.store import CANARY, VersionStore
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

FOLDER = "canary"
LEAST_REQUESTS = 30
"""Of each version, before a canary is taken back."""
Z_OF_LOOKS = 3.29
"""Standard deviations of what takes it back: the counts are looked at every few seconds, and of so many looks
at two equal versions one or the other would pass 95 %."""
QUANTILES = (0.5, 0.95)
"""Of the latency that are compared. A slow canary delays the others' tail, since both share the device, but
hardly their median."""
OFFLINE_METRIC = "ndcg@10"

EndState = Literal["returned", "promoted", "stopped"]


class CanarySettings(Config):
    """Which share a canary gets, and what it has to show."""

    share: float = Field(0.05, gt=0, lt=1)
    """Of the users."""
    min_requests: int = Field(1000, ge=LEAST_REQUESTS)
    """That it has answered, before it is promoted."""
    min_users: int = Field(100, ge=1, le=MOST_USERS)
    """Whom it has answered, about, before it is promoted: many requests of a few say little of others."""
    for_s: float = Field(600.0, ge=0)
    """Time that it has to run before it is promoted."""
    max_more_errors: float = Field(0.01, gt=0, lt=1)
    """By which its share of errors may be above that of the version that serves."""
    max_latency_ratio: float = Field(1.2, ge=1)
    """Times the median, and the 95th percentile, of the version that serves, which its own may be."""
    max_loss: float = Field(0.02, ge=0, lt=1)
    """Share of the offline metric that may be lost; the smaller, the more users tell."""
    needs_evaluation: bool = False
    """It is not promoted before an offline evaluation."""
    promotes: bool = True
    """It is promoted when it has passed; else by `rayrec canary promote` alone."""


class Canary(Config):
    """As it was started."""

    id: str
    version: int
    baseline: int
    """The version that serves meanwhile."""
    began_at: float
    """UNIX seconds."""
    was_held: bool
    """The baseline was gone back to before."""
    settings: CanarySettings


class _Record(Config):
    """What any replica has to understand, of whatever code: fields that it does not know are passed over."""

    model_config = ConfigDict(extra="ignore")


class CanaryEnd(_Record):
    """How it ended."""

    state: EndState
    reason: str
    at: float
    """UNIX seconds."""


class OfflineEvaluation(_Record):
    """Both versions on held-out data."""

    metric: str
    split: str
    num_users: int
    baseline: float
    canary: float
    ratio: tuple[float, float, float]
    """Of the canary's by the baseline's, with its 95 % interval over paired users."""

    def failure(self, settings: CanarySettings) -> str | None:
        """Why it takes the canary back; None: it does not."""
        return self._compared(settings) if Estimate(*self.ratio).high < 1 - settings.max_loss else None

    def doubt(self, settings: CanarySettings) -> str | None:
        """Why it does not let the canary be promoted; None: it does."""
        return self._compared(settings) if Estimate(*self.ratio).low < 1 - settings.max_loss else None

    def _compared(self, settings: CanarySettings) -> str:
        ratio, least = Estimate(*self.ratio), 1 - settings.max_loss
        return (
            f"{self.metric} of {self.num_users:,} users ({self.split}) is {self.canary:.4f} instead of "
            f"{self.baseline:.4f}: {ratio.value:.3f} times as much ({ratio.low:.3f} to {ratio.high:.3f}), "
            f"and {least:.3g} is the least"
        )


@dataclass(frozen=True)
class Verdict:
    """What the counts say now."""

    state: Literal["worse", "open", "passed"]
    reason: str


def judged(
    counts: CanaryCounts, settings: CanarySettings, ran_s: float, offline: OfflineEvaluation | None = None
) -> Verdict:
    """Judge a canary that has run for so long.

    It is worse where the intervals say so; it has passed where enough requests say that it is not.
    """
    if offline is not None and (why := offline.failure(settings)) is not None:
        return Verdict("worse", why)
    canary, baseline = counts.canary, counts.baseline
    if min(canary.num_requests, baseline.num_requests) >= LEAST_REQUESTS:
        more = counts.more_errors(Z_OF_LOOKS)
        if more.low > settings.max_more_errors:
            return Verdict(
                "worse",
                f"{canary.num_errors:,} of {canary.num_requests:,} requests have failed, and of the version "
                f"that serves {baseline.num_errors:,} of {baseline.num_requests:,}",
            )
    fewest = min(canary.num_answers, baseline.num_answers)
    is_slow = False
    if fewest >= LEAST_REQUESTS:
        for share in QUANTILES:
            slower = counts.more_beyond(share, settings.max_latency_ratio, Z_OF_LOOKS)
            is_slow |= slower.value > 0
            if slower.low > 0:
                mine, other = canary.quantile_s(share), baseline.quantile_s(share)
                return Verdict(
                    "worse",
                    f"the {100 * share:.0f}th percentile of its latency is {1000 * mine:.1f} ms, and of the "
                    f"version that serves {1000 * other:.1f} ms",
                )
    if (why := _too_early(counts, settings, ran_s)) is not None:
        return Verdict("open", why)
    if (high := counts.more_errors().high) > settings.max_more_errors:
        return Verdict("open", f"up to {high:.2%} more of its requests may fail; more of them will tell")
    if is_slow:
        return Verdict("open", "it may be slower; more requests will tell")
    if offline is None and settings.needs_evaluation:
        return Verdict("open", "it is not evaluated yet: rayrec canary evaluate STORE --data DATA")
    if offline is not None and (why := offline.doubt(settings)) is not None:
        return Verdict("open", f"it may be worse, and more users would tell: {why}")
    return Verdict("passed", f"{canary.num_requests:,} requests, no worse than the version that serves")


def _too_early(counts: CanaryCounts, settings: CanarySettings, ran_s: float) -> str | None:
    """What a canary still waits for before anything is said for it."""
    arms = counts.canary, counts.baseline
    if (fewest := min(arm.num_answers for arm in arms)) < settings.min_requests:
        return f"{fewest:,} of {settings.min_requests:,} requests so far"
    if (fewest := min(arm.num_users for arm in arms)) < settings.min_users:
        return f"about {fewest:,} of {settings.min_users:,} users so far"
    return f"{ran_s:.0f} of {settings.for_s:g} s so far" if ran_s < settings.for_s else None


class Canaries:
    """The canary of a store, of which there is one at a time; any process may read and write."""

    def __init__(self, store: VersionStore, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: UNIX seconds.
        """
        self._store, self._clock = store, clock
        self._settled: str | None = None
        """The canary whose end is known to have had its effect."""

    @property
    def serving(self) -> int | None:
        """The version that the store points to."""
        pointer = self._store.current()
        return None if pointer is None else pointer.version

    def last(self) -> Canary | None:
        """The one that was started last, whether it runs or not.

        Raises:
            InputError: its file is damaged.
        """
        content = self._store.read(CANARY)
        return None if content is None else _parsed(Canary, content, f"{self._store.url}/{CANARY}")

    def running(self) -> Canary | None:
        """Raises as `last`."""
        canary = self.last()
        return None if canary is None or self.end(canary) is not None else canary

    def end(self, canary: Canary) -> CanaryEnd | None:
        """How it ended; None: it runs."""
        name = _end_of(canary)
        content = self._store.read(name)
        return None if content is None else _parsed(CanaryEnd, content, f"{self._store.url}/{name}")

    def hold_baseline(self) -> bool:
        """Hold the version that serves, so that one which is published now does not; whether it was held.

        Raises:
            InputError: as `check_start`.
        """
        baseline, pointer = self.check_start(), self._store.current()
        assert pointer is not None, "there is a baseline"
        self._store.point_to(baseline, is_held=True)
        return pointer.is_held

    @contextmanager
    def baseline_held(self) -> Iterator[bool]:
        """Hold the version that serves, as `hold_baseline`, for a block that starts a canary. When the block
        fails before, the version is let go, so that it does not stay held for nothing."""
        was_held = self.hold_baseline()
        held = self.serving
        try:
            yield was_held
        except BaseException:
            # Somebody may have gone to another version meanwhile.
            if held is not None and held == self.serving and not was_held and self.running() is None:
                self._store.point_to(held, is_held=False)
            raise

    def start(self, version: int, settings: CanarySettings, was_held: bool | None = None) -> Canary:
        """Give a version its share, and hold the one that serves.

        Args:
            was_held: whether it was held before `hold_baseline` held it; None: that was not called.

        Raises:
            InputError: there is no version that serves to compare it with, it serves itself, there is no
                such version, somebody is deleting it, or another canary runs.
        """
        baseline = self.check_start()
        self._store.version(version)
        if version == baseline:
            raise InputError(
                f"{self._store.url}: version {version} serves already, so there is nothing to compare it "
                "with; name another one"
            )
        if was_held is None:
            # Held first: the one that it is compared with must not change.
            with self.baseline_held() as is_held_before:
                return self.start(version, settings, is_held_before)
        before = self.last()
        canary = Canary(
            id=uuid.uuid4().hex[:12],
            version=version,
            baseline=baseline,
            began_at=self._clock(),
            was_held=was_held,
            settings=settings,
        )
        self._store.write_naming(CANARY, canary.model_dump_json().encode(), version)
        if before is not None:
            self._store.delete_folder(f"{FOLDER}/{before.id}")
        return canary

    def check_start(self) -> int:
        """The version that a canary would be compared with.

        Raises:
            InputError: none serves, or another canary runs.
        """
        self.settle()
        pointer = self._store.current()
        if pointer is None:
            raise InputError(
                f"{self._store.url}: no version serves, so a canary has no baseline to be compared with; "
                "publish one without --canary first"
            )
        if (running := self.running()) is not None:
            raise InputError(
                f"{self._store.url}: version {running.version} is a canary already; rayrec canary promote "
                "or stop ends it"
            )
        return pointer.version

    def finish(self, canary: Canary, state: EndState, reason: str) -> CanaryEnd:
        """End a canary, and let the one serve that is to; returns how it ended, which somebody else may have
        said before. One that another has followed is over, and nothing is done."""
        if not self._is_last(canary):
            return CanaryEnd(state="stopped", reason="another canary was started since", at=self._clock())
        mine = CanaryEnd(state=state, reason=reason, at=self._clock())
        self._store.write_new(_end_of(canary), mine.model_dump_json().encode())
        self.settle()
        return self.end(canary) or mine

    def settle(self) -> None:
        """Let the end of the last canary have its effect, unless it has had it: the process that wrote it may
        have been killed, or cut off from the store, before it moved the pointer.

        Raises:
            InputError: a file of the canary is damaged.
        """
        canary = self.last()
        if canary is None or canary.id == self._settled or (end := self.end(canary)) is None:
            return
        name = f"{FOLDER}/{canary.id}/{_SETTLED}"
        # Once: a later rollback to the baseline is meant.
        if self._store.read(name) is None:
            self._note_taken_back(canary.version, end.state != "promoted")
            self._move_pointer(canary, end)
            self._store.write(name, b"{}\n")
        self._settled = canary.id

    def _move_pointer(self, canary: Canary, end: CanaryEnd) -> None:
        pointer = self._store.current()
        if pointer is None or pointer.version != canary.baseline or not pointer.is_held:
            return  # somebody has moved it since
        if end.state == "promoted":
            self._store.point_to(canary.version, is_held=False)
        elif not canary.was_held and self._store.numbers()[-1] == canary.baseline:
            self._store.point_to(canary.baseline, is_held=False)

    def taken_back(self) -> frozenset[int]:
        """Versions that were returned or stopped as canaries, and that nobody has let serve since.

        Raises:
            InputError: the file that says so is damaged.
        """
        content = self._store.read(_TAKEN_BACK)
        if content is None:
            return frozenset()
        return frozenset(_parsed(_TakenBack, content, f"{self._store.url}/{_TAKEN_BACK}").versions)

    def _note_taken_back(self, version: int, is_taken_back: bool) -> None:
        before = self.taken_back()
        after = (before & frozenset(self._store.numbers())) - {version}
        if is_taken_back:
            after |= {version}
        if after != before:
            content = _TakenBack(versions=tuple(sorted(after))).model_dump_json()
            self._store.write(_TAKEN_BACK, f"{content}\n".encode())

    def go_back(self, number: int) -> None:
        """Let a version serve, and stay although newer ones come. A canary that runs is stopped: what it is
        compared with is not what serves any more.

        Raises:
            InputError: there is no such version, or somebody is deleting it.
        """
        self._store.version(number)
        if (running := self.running()) is not None:
            self.finish(running, "stopped", f"somebody let version {number} serve")
        self._store.point_to(number, is_held=True)
        self._note_taken_back(number, False)

    def let_newest_serve(self) -> int:
        """Let the newest version serve that was not taken back as a canary, and those that come; returns it.

        Raises:
            InputError: a canary runs.
        """
        self.settle()
        if (running := self.running()) is not None:
            raise InputError(
                f"{self._store.url}: version {running.version} is a canary, and version {running.baseline} "
                "is held meanwhile; rayrec canary promote lets the one serve all users, rayrec canary stop "
                "the other"
            )
        return self._store.let_newest_serve(besides=self.taken_back())

    def _is_last(self, canary: Canary) -> bool:
        last = self.last()
        return last is not None and last.id == canary.id

    def report(self, canary: Canary, replica: str, counts: CanaryCounts) -> None:
        """Write down what a replica has counted so far."""
        self._store.write(f"{FOLDER}/{canary.id}/{_REPORT}{replica}.json", counts.to_json().encode())

    def counts(self, canary: Canary) -> CanaryCounts:
        """Of all replicas, those that have ended included. Reports of other code that counts otherwise are
        passed over: its replicas judge by their own."""
        found = []
        for name in self._store.names_in(f"{FOLDER}/{canary.id}"):
            if name.startswith(_REPORT) and (content := self._store.read(f"{FOLDER}/{canary.id}/{name}")):
                try:
                    found.append(CanaryCounts.of_json(content))
                except OtherFormatError as error:
                    logger.warning("%s/%s: passed over: %s", self._store.url, name, error)
                except ValueError as error:
                    raise InputError(f"{self._store.url}/{FOLDER}/{canary.id}/{name}: {error}") from error
        return CanaryCounts.total(found)

    def note_evaluation(self, canary: Canary, evaluation: OfflineEvaluation) -> None:
        self._store.write(f"{FOLDER}/{canary.id}/{_OFFLINE}", evaluation.model_dump_json().encode())

    def evaluation(self, canary: Canary) -> OfflineEvaluation | None:
        name = f"{FOLDER}/{canary.id}/{_OFFLINE}"
        content = self._store.read(name)
        return None if content is None else _parsed(OfflineEvaluation, content, f"{self._store.url}/{name}")

    def verdict(self, canary: Canary) -> Verdict:
        """What all that was counted says now."""
        ran_s = self._clock() - canary.began_at
        return judged(self.counts(canary), canary.settings, ran_s, self.evaluation(canary))


_REPORT, _OFFLINE, _SETTLED = "counts-", "offline.json", "settled.json"
_TAKEN_BACK = f"{FOLDER}/taken-back.json"


class _TakenBack(Config):
    versions: tuple[int, ...]


def _end_of(canary: Canary) -> str:
    return f"{FOLDER}/{canary.id}/end.json"


Parsed = TypeVar("Parsed", bound=Config)


def _parsed(kind: type[Parsed], content: bytes, where: str) -> Parsed:
    try:
        return kind.parse(json.loads(content), source=where)
    except ValueError as error:
        raise InputError(f"{where}: cannot be read: {error}") from error

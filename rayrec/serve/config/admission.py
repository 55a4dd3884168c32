"""Settings of what stands between a request and the model: limits, and what degrades under load."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.serve.config.allocation import AllocateConfig

StepName = Literal["fewer_beams", "shorter_history", "no_ranking", "cached_answer", "popular_items"]


class LimitConfig(Config):
    """What is admitted; by default everything. Each row of a message of tensors or prompts is a request, and
    one that takes as long as ten usual ones, since it asks for many items, counts as ten."""

    rate: float | None = Field(None, gt=0)
    """Requests per second over time; None is any number."""
    burst: int | None = Field(None, ge=1)
    """Requests that may come at once after a pause; None is those of one second, at least 1. No message may
    have more rows than this, or than `concurrency`."""
    concurrency: int | None = Field(None, ge=1)
    """Requests in flight at most; None is any number."""

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> Self:
        if self.burst is not None and self.rate is None:
            raise ValueError(f"burst is {self.burst} without a rate, at which it would fill again; give both")
        return self

    @property
    def admits_everything(self) -> bool:
        return self.rate is None and self.concurrency is None

    @property
    def most_of_burst(self) -> int | None:
        """`burst`, or what stands for it; None without a rate."""
        if self.rate is None:
            return None
        return self.burst or max(1, math.ceil(self.rate))

    @property
    def most_at_once(self) -> int | None:
        """Requests that are admitted together after a pause; None is any number."""
        return min((most for most in (self.most_of_burst, self.concurrency) if most), default=None)


USER_HEADER = "X-User-Id"
"""Says whom a request is for, to those that do not read its body."""


class CallersConfig(LimitConfig):
    """What each caller is admitted for."""

    header: str = Field("X-Caller-Key", min_length=1)
    """Names the caller; requests without one go by the address of the connection. Any client can send any
    key, so a limit holds against honest clients, or after a gateway that sets the header."""
    most_kept: int = Field(10_000, ge=1)
    """Callers remembered; beyond these, the least recently seen is forgotten and starts with a full limit."""


class StepConfig(Config):
    """One thing that is done to compute less."""

    do: StepName
    to: int | None = Field(None, ge=1)
    """Beams of `fewer_beams`, newest events of `shorter_history`; the others have none."""
    enter: float = Field(gt=0)
    """The load from which on the step is in force."""
    leave: float = Field(ge=0)
    """The load below which it no longer is; lower than `enter`, so that it does not come and go."""

    @model_validator(mode="after")
    def _step_is_complete(self) -> Self:
        has_number = self.do in ("fewer_beams", "shorter_history")
        if has_number and self.to is None:
            raise ValueError(f"degrade.steps: {self.do!r} needs a number, as in to: 20")
        if not has_number and self.to is not None:
            raise ValueError(f"degrade.steps: {self.do!r} takes no number, got to: {self.to}; leave it out")
        if self.leave >= self.enter:
            raise ValueError(
                f"degrade.steps: {self.do!r} is entered at {self.enter} and left below {self.leave}; leave "
                "it at a lower load, or it would come and go with every request"
            )
        return self


class CacheConfig(Config):
    """Answers kept for the step `cached_answer`."""

    max_entries: int = Field(10_000, ge=1)
    max_age_s: float = Field(60.0, gt=0)
    """Older ones are not given."""


class DegradeConfig(Config):
    """What degrades at which load; by default nothing."""

    by: Literal["capacity", "wait"] = "capacity"
    """What load is: `capacity`, the requests in flight as a share of those a replica holds; `wait`, the time
    that a request would wait by what batches take, as a share of `timeout_s`."""
    steps: list[StepConfig] = Field(default_factory=list)
    """In the order in which they are entered; those before stay in force."""
    cache: CacheConfig = CacheConfig()

    @model_validator(mode="after")
    def _steps_ascend(self) -> Self:
        for before, after in pairwise(self.steps):
            if after.enter < before.enter or after.leave < before.leave:
                raise ValueError(
                    f"degrade.steps: {after.do!r} is entered at {after.enter} and left below {after.leave}, "
                    f"but follows {before.do!r} with {before.enter} and {before.leave}; order steps by "
                    "load"
                )
        if self.by == "capacity":
            for step in self.steps:
                if step.enter > 1:
                    raise ValueError(
                        f"degrade.steps: {step.do!r} is entered at {step.enter} of the capacity, which never "
                        "is; give at most 1"
                    )
        return self


class AdmissionConfig(Config):
    """Which requests are admitted, and what degrades before any is refused. Each replica counts by itself."""

    service: LimitConfig = LimitConfig()
    """Of all callers together; more are refused with status 503."""
    callers: CallersConfig = CallersConfig()
    """Of each caller; more are refused with status 429."""
    degrade: DegradeConfig = DegradeConfig()
    allocate: AllocateConfig | None = None
    """Which requests get full effort while there is too little for all; None: all of them, until `degrade`
    holds for everybody."""

    @property
    def fewer_beams(self) -> tuple[int, ...]:
        """That `degrade` and `allocate` go down to."""
        of_steps = [step.to for step in self.degrade.steps if step.do == "fewer_beams"]
        actions = () if self.allocate is None else self.allocate.actions
        of_actions = [action.max_beams for action in actions]
        return tuple(each for each in (*of_steps, *of_actions) if each is not None)


OPEN = AdmissionConfig()
"""Everything is admitted, and nothing degrades."""

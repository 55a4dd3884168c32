"""Waiting for a run's actors without waiting for ever: a stage that hangs is found, as one that died is.

A reader or feature worker that hangs is killed: Ray starts it again and repeats its calls. Of a server or
trainer the state is lost with it, so the run has to go back to its last snapshot: `StageHungError`.

One of those that dies is heard of also by who waits for somebody else. That may be a worker that was lost
with the same node, and cannot come back before the attempt has ended and given its places up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from rayrec.actors.heartbeats import HEARTBEATS_PER_TIMEOUT, Account, kill_process
from rayrec.platform.ray_errors import StageHungError

logger = logging.getLogger(__name__)

MONITOR_PATIENCE_S = 30.0
"""How long the monitor of heartbeats may take to answer."""
MISSED_HEARTBEATS = 2
"""After which a process may well be silent, and is waited for before others are blamed."""


GATHER_S = 0.01
"""In which objects that come one after the other are taken together; an error is heard of so much later."""
ASK_EVERY_S = 5.0
"""While nothing comes, servers and trainers are asked whether they are there."""


class Watch:
    """Waits for objects of Ray's; looks after the actors when none comes for a long time. Thread-safe."""

    def __init__(
        self,
        monitor: ActorHandle,
        stateless: frozenset[str],
        hang_timeout_s: float,
        stateful: Sequence[ActorHandle] = (),
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        """
        Args:
            stateless: names of the actors that may be killed, since they come back by themselves.
            hang_timeout_s: time without any object after which something hangs.
            stateful: those whose death ends the attempt, whichever is waited for.
        """
        self._monitor = monitor
        self._stateful = list(stateful)
        self._ask_every_s = ask_every_s
        self._asking = threading.Lock()
        """The training loop and the thread that writes snapshots wait at once."""
        self._asked: dict[int, Any] = {}
        """By position among `stateful`: a call that is not answered yet."""
        self._stateless = stateless
        self._hang_timeout_s = hang_timeout_s

    def wait(self, refs: Sequence[Any], may_take_long: bool = False) -> list[Any]:
        """One or more of the objects that are there.

        Args:
            may_take_long: of a call that is at work for longer than the timeout nothing is thought, only of
                a process that gives no sign of life.

        Raises:
            StageHungError: a server or trainer hangs.
            RayError: a server or trainer died.
        """
        looked = False
        while True:
            if ready := self._ready_in_time(refs):
                return ready
            self._look_after(looked, may_take_long)
            looked = True

    def _ready_in_time(self, refs: Sequence[Any]) -> list[Any]:
        """Nothing, if none of the objects comes before something counts as hanging."""
        ends = time.monotonic() + self._hang_timeout_s
        while (left_s := ends - time.monotonic()) > 0:
            ready, _ = ray.wait(list(refs), num_returns=1, timeout=min(left_s, self._ask_every_s))
            if ready:
                return list(ready)
            self._ask_stateful()
        return []

    def _ask_stateful(self) -> None:
        """Raises what the dead answer with; the others answer when they are done with what they are at.

        Of two threads that wait, one hears of a death: the other one asks again, and hears of it then.
        """
        with self._asking:
            for position, actor in enumerate(self._stateful):
                if position not in self._asked:
                    self._asked[position] = actor.stats.remote()
            if not self._asked:
                return
            ready, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
            answered = [position for position, ref in self._asked.items() if ref in ready]
            refs = [self._asked.pop(position) for position in answered]
        for ref in refs:  # without the lock: what is there may lie on a node that is gone
            with contextlib.suppress(ActorUnavailableError):  # of one that is dead, Ray knows it soon
                ray.get(ref)

    def get(self, refs: Sequence[Any], may_take_long: bool = False) -> list[Any]:
        """The objects' values; the first error among them ends the wait for the others."""
        values: dict[Any, Any] = {}
        while waiting := [ref for ref in refs if ref not in values]:
            ready = self.wait(waiting, may_take_long)
            if len(ready) < len(waiting):
                # Those that come at about the same time together: Ray looks at all of them in every round.
                ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=GATHER_S)
            values.update(zip(ready, ray.get(ready), strict=True))
        return [values[ref] for ref in refs]

    def look_after_silent(self) -> None:
        """While actors start, which may take any time: find a process that gives no sign of life any more.

        Raises:
            StageHungError: it is a server or trainer.
        """
        self._look_after(again=False, may_take_long=True)

    def _look_after(self, again: bool, may_take_long: bool) -> None:
        accounts = self._accounts()
        silent = self._silent(accounts)
        if not silent and not again and self._is_in_doubt(accounts):
            return  # a call of now may wait for a process that counts as silent next time
        hung = silent or ({} if may_take_long else self._stuck(accounts))
        if not hung:
            # Everybody says that it is at work on something short, and nothing comes of it.
            if again and not may_take_long:
                raise StageHungError(
                    f"nothing has come of the run's actors for {2 * self._hang_timeout_s:.0f} s"
                )
            return
        for name, account in hung.items():
            if name in self._stateless:
                logger.warning("%s; it is killed and starts again", _described(name, account))
                kill_process(account.heartbeat.process)
        lost = [_described(name, account) for name, account in hung.items() if name not in self._stateless]
        if len(lost) == len(hung):
            for account in hung.values():
                kill_process(account.heartbeat.process)
            raise StageHungError("; ".join(lost))

    def _accounts(self) -> Mapping[str, Account]:
        """Nothing, if the monitor does not answer: it comes back by itself if it has died."""
        try:
            asked: Any = self._monitor.accounts.remote()
            accounts: Mapping[str, Account] = ray.get(asked, timeout=MONITOR_PATIENCE_S)
            return accounts
        except (GetTimeoutError, RayError) as error:
            logger.warning(
                "nothing has come for %.0f s, and no word of the actors: %s", self._hang_timeout_s, error
            )
            return {}

    def _is_in_doubt(self, accounts: Mapping[str, Account]) -> bool:
        limit_s = MISSED_HEARTBEATS * self._hang_timeout_s / HEARTBEATS_PER_TIMEOUT
        return any(account.age_s >= limit_s for account in accounts.values())

    def _silent(self, accounts: Mapping[str, Account]) -> dict[str, Account]:
        return {name: account for name, account in accounts.items() if account.age_s >= self._hang_timeout_s}

    def _stuck(self, accounts: Mapping[str, Account]) -> dict[str, Account]:
        """Those that have been in one call for long; others than these wait for them.

        Readers and feature workers wait for nobody: where one of them is stuck, it is at fault.
        """
        limit_s = self._hang_timeout_s
        stuck = {name: account for name, account in accounts.items() if account.heartbeat.busy_s >= limit_s}
        return {name: account for name, account in stuck.items() if name in self._stateless} or stuck


def _described(name: str, account: Account) -> str:
    if account.heartbeat.call is None or account.age_s > account.heartbeat.busy_s:
        return f"{name} hangs: it has given no sign of life for {account.age_s:.0f} s"
    return f"{name} hangs: it has been in {account.heartbeat.call} for {account.heartbeat.busy_s:.0f} s"

"""Online learning on one machine: a trainer follows the service's events, the service its versions.

    POST /v1/events ─► users' state (event store) ─► the next recommendation
                    └► log (Parquet below data.samples) ─► trainer, its histories out of the same store
    answers ◄─ flip ◄─ versions (snapshots.publish) ◄─ snapshot ◄─┘

One run's config says all of it, so that what the service writes is what the trainer reads. The two meet in
files alone: either may end and be started again, and on several machines they are `rayrec train` and `rayrec
serve` with the same folders.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from rayrec.samples.operations.join_history import JoinHistoryConfig
from rayrec.serve.config.events import EventsConfig, LogConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.launch import serving, stop_signal

logger = logging.getLogger(__name__)

FINISHED, BAD_INPUT = 0, 2
"""What a command ends with that did all of its work, or was refused."""
LIVE_FOLDER = "live"
"""Below `data.samples`: rows of events that came to the service."""
ROLL_S = 3.0
"""Oldest that an event gets before its row is in a file."""
LOOK_EVERY_S = 0.5
MOST_RESTARTS = 5
"""Of a trainer that ends by itself, in a row."""
STEADY_S = 300.0
"""A trainer that lived so long has used up none of them."""
STOP_TIMEOUT_S = 60.0


def events_of(config: RunConfig) -> EventsConfig:
    """What a service does with events so that the run trains on them.

    Raises:
        InputError: the run follows no folder, publishes nothing, or does not read histories from a store.
    """
    if config.data.follow is None or config.data.samples is None:
        raise InputError("data.follow and data.samples: give both, so that the run trains on rows that come")
    if config.snapshots.publish is None:
        raise InputError("snapshots.publish: name a folder or URL from which the service takes versions")
    joins = [each for each in config.data.features if isinstance(each, JoinHistoryConfig)]
    if len(joins) != 1:
        raise InputError(
            f"data.features: {len(joins)} operations `join_history`; the run needs one, whose store the "
            "service writes to"
        )
    folder = f"{config.data.samples.rstrip('/')}/{LIVE_FOLDER}"
    return EventsConfig(store=joins[0].store, log=LogConfig(folder=folder, roll_s=ROLL_S))


def online_run(config_file: Path, overrides: Sequence[str], run: Path, service: ServeConfig) -> None:
    """Train and serve until SIGINT or SIGTERM; call it on the main thread.

    A run that was begun in the folder goes on. The trainer is a process of its own, which is started again
    when it ends by itself; the service answers meanwhile.

    Raises:
        InputError: as `events_of`, or the service cannot be started.
        RuntimeError: the trainer ends again and again, or before there is anything to serve. One that has
            finished, as its settings say, leaves the service to go on with its last version.
    """
    config = RunConfig.load(config_file, overrides)
    events = events_of(config)
    assert config.snapshots.publish is not None
    store = config.snapshots.publish.to
    command = [sys.executable, "-m", "rayrec", "train", str(config_file), "--run", str(run)]
    command += ["--resume-if-begun", *(part for each in overrides for part in ("--set", each))]
    with ExitStack() as stack:
        stopped = stack.enter_context(stop_signal())
        trainer = TrainerProcess(lambda: subprocess.Popen(command))
        stack.callback(trainer.stop)
        trainer.start()
        if not VersionStore.is_there(store):
            logger.info("nothing answers before the trainer's first snapshot, which is the first version")
        while not VersionStore.is_there(store):
            trainer.check(may_restart=False)
            if trainer.is_finished and not VersionStore.is_there(store):
                raise RuntimeError("the trainer has finished and published nothing that could be served")
            if stopped.wait(LOOK_EVERY_S):
                return
        changed = {"single_process": True, "events": events}
        url = stack.enter_context(serving(store, service.model_copy(update=changed)))
        logger.info("answering at %s/v1/recommend, events at %s/v1/events; Ctrl-C stops", url, url)
        while not stopped.wait(LOOK_EVERY_S):
            trainer.check()
        logger.info("stopping")


class TrainerProcess:
    """A process that trains, and is started again when it ends by itself."""

    def __init__(
        self, start: Callable[[], subprocess.Popen[bytes]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._start, self._clock = start, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._num_restarts = 0
        self.is_finished = False
        """It did all that its settings ask for: started again, it would end at once."""

    def start(self) -> None:
        self._process, self._started_s = self._start(), self._clock()

    def check(self, may_restart: bool = True) -> None:
        """Start it again if it has ended.

        Raises:
            InputError: its settings or data were refused.
            RuntimeError: it may not be, or was too often; says how it ended.
        """
        assert self._process is not None
        code = self._process.poll()
        if code is None or self.is_finished:
            return
        if code == FINISHED:
            self.is_finished = True
            logger.warning("the trainer has finished: events are kept, and nobody learns from them any more")
            return
        if self._clock() - self._started_s >= STEADY_S:
            self._num_restarts = 0
        if code == BAD_INPUT:
            raise InputError("the trainer was refused; what it said above tells why")
        if not may_restart or self._num_restarts >= MOST_RESTARTS:
            raise RuntimeError(f"the trainer ended with code {code}; what it said above tells why")
        self._num_restarts += 1
        logger.warning("the trainer ended with code %d and goes on from its last snapshot", code)
        self.start()

    def stop(self) -> None:
        """End it, and wait until it has; its run can be resumed."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the trainer does not end by itself, and is killed")
            process.kill()
            process.wait()

"""From events that were posted to the users' state and to the log that training follows.

    check all ─► room in the log? ─► state.append ─► log.add
       └ 422          └ 503             └ 503, the room is given back: nothing was taken

The state comes first, since a history may know an event whose row is not written, while a row of an event
that no history knows would be a target without what led to it. A process remembers the events that it has
logged of late and logs none twice. What another replica logged again has the same `event_key`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import UNKNOWN
from rayrec.platform.hashing import combine64
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import IdKind
from rayrec.samples.prepare.ids import hash_strings, ids_of_kind
from rayrec.samples.prepare.times import micros_of_seconds
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.config.events import EventsConfig
from rayrec.serve.events.parquet_log import ParquetLog
from rayrec.serve.events.user_state import UserState, open_state
from rayrec.serve.wire.schemas import Event, EventsAnswer

LOG_SCHEMA = pa.schema(
    [
        ("user_id", pa.int64()),
        ("item_id", pa.int64()),
        ("timestamp", pa.timestamp("us")),
        ("behavior", pa.string()),
        ("event_key", pa.int64()),
    ]
)
"""As `rayrec data keys` writes rows, and `join_history` reads them; the last two are additional."""

_MOST_REMEMBERED = 100_000
"""Events of which a process knows that it logged them."""


class RefusedEventError(ValueError):
    """An event that is not taken; the message is for the caller. Nothing of its message was taken."""


class LogFullError(RuntimeError):
    """Events cannot be taken, since they could not be logged. Nothing was done."""


class EventIntake:
    """Takes events; safe to call from several threads."""

    def __init__(
        self,
        config: EventsConfig,
        catalog: Callable[[], Dataset],
        state: UserState,
        log: ParquetLog | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            catalog: the data set that answers are of now; its kinds of ids stay the same.
            clock: UNIX seconds.
        """
        self.state = state
        """What users did, for the service that answers them."""
        self._config, self._log, self._clock = config, log, clock
        self._catalog, self._id_kinds = catalog, catalog().manifest.id_kinds
        self._logged: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()
        self._taken = self._repeated = self._unknown = 0

    @classmethod
    def open(cls, config: EventsConfig, catalog: Callable[[], Dataset]) -> EventIntake:
        """With the state and the log that the settings name.

        Raises:
            InputError: the store or the log cannot be used, or the data set has no times of histories, which
                tell what is known twice.
            StoreUnavailableError: the store does not answer.
        """
        dataset, log = catalog(), None
        dataset.check_times()
        if config.log is not None:
            rows = config.log
            log = ParquetLog(rows.folder, LOG_SCHEMA, rows.roll_s, rows.roll_rows, rows.max_queued)
        try:
            state = open_state(config, dataset.manifest)
        except BaseException:
            if log is not None:
                log.close()
            raise
        return cls(config, catalog, state, log)

    def take(self, events: Sequence[Event]) -> EventsAnswer:
        """All of the events, or none.

        Raises:
            RefusedEventError: one of them cannot be taken, or they are too many.
            LogFullError: the log has no room.
            UnavailableError: the event store does not answer.
        """
        self.check_count(len(events))
        if not events:
            return EventsAnswer(taken=0, repeated=0, unknown_items=0)
        users_E = self._ids([event.user_id for event in events], "user")
        items_E = self._ids([event.item_id for event in events], "item")
        times_E = self._times_us(events)
        codes_E = self._codes(events)
        if self._log is not None and not self._log.reserve(len(events)):
            raise LogFullError("the log of events has no room, since it cannot be written")
        try:
            added = self.state.append(users_E, UserEvents(times_E, items_E, codes_E))
        except BaseException:
            if self._log is not None:
                self._log.release(len(events))
            raise
        if self._log is not None:
            self._add_rows(self._log, events, users_E, items_E, times_E)
        unknown = int((self._catalog().item_positions(items_E) < 0).sum())
        answer = EventsAnswer(taken=len(events), repeated=len(events) - added, unknown_items=unknown)
        with self._lock:
            self._taken += answer.taken
            self._repeated += answer.repeated
            self._unknown += unknown
        return answer

    def check_count(self, count: int) -> None:
        """Check how many events one message has.

        Raises:
            RefusedEventError: so many events are too many of one message.
        """
        if count > self._config.max_events:
            raise RefusedEventError(
                f"{count} events are more than the {self._config.max_events} of one message"
            )

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        with self._lock:
            found: dict[str, float] = {
                "events_taken_total": self._taken,
                "events_repeated_total": self._repeated,
                "events_of_unknown_items_total": self._unknown,
            }
        return found if self._log is None else found | log_metrics("event_log", self._log)

    def close(self) -> None:
        """Write what is left."""
        if self._log is not None:
            self._log.close()
        self.state.close()

    def _add_rows(
        self,
        log: ParquetLog,
        events: Sequence[Event],
        users_E: Int64Array,
        items_E: Int64Array,
        times_E: Int64Array,
    ) -> None:
        names_E = hash_strings([event.behavior or "" for event in events])
        keys = combine64(users_E, items_E, times_E, names_E).view(np.int64).tolist()
        rows = []
        with self._lock:
            for event, key, user, item, at in zip(
                events, keys, users_E.tolist(), items_E.tolist(), times_E.tolist(), strict=True
            ):
                if key in self._logged:
                    self._logged.move_to_end(key)
                    continue
                self._logged[key] = None
                rows.append(
                    {
                        "user_id": user,
                        "item_id": item,
                        "timestamp": at,
                        "behavior": event.behavior,
                        "event_key": key,
                    }
                )
            while len(self._logged) > _MOST_REMEMBERED:
                self._logged.popitem(last=False)
        log.release(len(events) - len(rows))
        log.add(rows)

    def _ids(self, keys: Sequence[str | int], entity: str) -> Int64Array:
        try:
            return ids_of(keys, self._id_kinds["user" if entity == "user" else "item"], entity)
        except InputError as error:
            raise RefusedEventError(str(error)) from error

    def _times_us(self, events: Sequence[Event]) -> Int64Array:
        now = self._clock()
        latest = now + self._config.max_ahead_s
        times = []
        for index, event in enumerate(events):
            at = now if event.timestamp is None else event.timestamp
            if at > latest:
                raise RefusedEventError(
                    f"{_field(events, index, 'timestamp')}: {at} is {at - now:.0f} s in the future; expected "
                    f"UNIX seconds, at most {self._config.max_ahead_s:g} s ahead of the service's clock"
                )
            times.append(at)
        return micros_of_seconds(np.array(times, dtype=np.float64))

    def _codes(self, events: Sequence[Event]) -> Int64Array:
        names = self.state.behaviors
        codes = []
        for index, event in enumerate(events):
            if names is None or (event.behavior is None and not names):
                codes.append(UNKNOWN)
            elif event.behavior in names:
                codes.append(names.index(event.behavior))
            else:
                said = "is missing" if event.behavior is None else f"{event.behavior!r} is not known"
                raise RefusedEventError(
                    f"{_field(events, index, 'behavior')}: {said}; expected one of {', '.join(names)}"
                )
        return np.array(codes, dtype=np.int64)


def _field(events: Sequence[Event], index: int, name: str) -> str:
    """Of one event as the sender knows it: one alone has no index."""
    return name if len(events) == 1 else f"{index}.{name}"


def ids_of(keys: Sequence[str | int], kind: IdKind, entity: str) -> Int64Array:
    """Give the ids that the data set has for keys of its source.

    Raises:
        InputError: a text instead of an integer, or an integer outside 64 bits.
    """
    return ids_of_kind(pa.array([str(key) for key in keys], pa.string()), kind, entity)


def log_metrics(name: str, log: ParquetLog) -> dict[str, float]:
    """What a meter watches of a log."""
    status = log.status
    return {
        f"{name}_queued": status.queued,
        f"{name}_dropped_total": status.dropped,
        f"{name}_rows_total": status.rows,
        f"{name}_files_total": status.files,
        f"{name}_failures_total": status.failures,
        f"{name}_newest_age_seconds": status.newest_age_s,
    }

"""Calendar, clock and lists of ids, each for itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.config import EvictionConfig
from rayrec.embeddings.table import ids_since
from rayrec.embeddings.table.age_calendar import LISTED_BYTES, AgeCalendar, calendar_of
from rayrec.embeddings.table.event_clock import ClockState, EventClock
from rayrec.embeddings.table.ids_since import IdsSince
from tests.helpers.examples import examples


def array(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def add(calendar: AgeCalendar, step: int, *ids: int) -> None:
    calendar.add(array(*ids), np.full(len(ids), step, dtype=np.int32))


def taken(calendar: AgeCalendar, step: int) -> list[int]:
    return sorted(int(i) for ids_K in calendar.take(step) for i in ids_K)


@pytest.mark.slow
def test_an_id_is_due_at_the_first_eviction_at_which_its_row_is_too_old():
    calendar = AgeCalendar(max_age_steps=3, every_steps=5)
    calendar.add_new(array(), 0)
    calendar.add_new(array(1), 0)  # too old from step 4 on
    add(calendar, 1, 2)  # from step 5 on: the eviction of step 9
    add(calendar, 5, 3)
    add(calendar, 6, 4)  # from step 10 on
    assert taken(calendar, 3) == []
    assert taken(calendar, 4) == [1]
    assert taken(calendar, 9) == [2, 3]
    assert calendar.ids().tolist() == [4]
    assert taken(calendar, 14) == [4]
    assert len(calendar.ids()) == 0


def test_ids_of_many_steps_at_once_go_to_the_lists_of_theirs():
    calendar = AgeCalendar(max_age_steps=1, every_steps=1)
    calendar.add(array(10, 11, 12, 13), np.array([5, 3, 5, -1], dtype=np.int32))
    assert [taken(calendar, step) for step in range(1, 8)] == [[13], [], [], [], [11], [], [10, 12]]


def test_what_is_added_while_a_list_is_taken_is_not_taken_again():
    calendar = AgeCalendar(max_age_steps=-1, every_steps=4)
    add(calendar, 2, 1, 2)
    for ids_K in calendar.take(3):
        add(calendar, 2, *ids_K.tolist())
    assert sorted(calendar.ids().tolist()) == [1, 2]


def test_a_share_that_is_looked_at_ahead_leaves_the_old_ones_to_the_eviction():
    calendar = AgeCalendar(max_age_steps=2, every_steps=4)
    add(calendar, 0, *range(100))  # due at step 3
    seen = []
    for step in range(3):
        for ids_K in calendar.ahead(step):
            seen.append(len(ids_K))
            changed_K = np.where(ids_K % 2 == 0, 3, 0).astype(np.int32)  # the even ones have changed since
            calendar.add_ahead(ids_K, changed_K, step)
        assert sorted(calendar.ids().tolist()) == list(range(100))
    assert seen == [25, 25, 25]
    assert set(range(1, 100, 2)) <= set(taken(calendar, 3))
    assert all(i % 2 == 0 for i in calendar.ids().tolist())


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 300)), max_size=12))
def test_a_calendar_counts_its_memory_and_gives_it_back(calls):
    calendar, next_id = AgeCalendar(max_age_steps=7, every_steps=3), 0
    for step, num_ids in calls:
        add(calendar, step, *range(next_id, next_id + num_ids))
        next_id += num_ids
        held = len(calendar.ids())
        assert 8 * held <= calendar.num_bytes <= LISTED_BYTES * held + 20 * 1024
    assert taken(calendar, 1000) == list(range(next_id))
    assert calendar.num_bytes == 0


def test_a_table_has_a_calendar_where_age_alone_says_which_rows_go():
    assert calendar_of(None) is None
    assert calendar_of(EvictionConfig(max_age_steps=3, max_rows_per_bucket=2)) is None
    assert calendar_of(EvictionConfig(max_rows=70_000)) is None
    assert calendar_of(EvictionConfig(ttl_hours=1, min_score=0.5, half_life_steps=9)) is None
    assert calendar_of(EvictionConfig(max_age_steps=3)) is not None
    assert calendar_of(EvictionConfig(ttl_hours=1)) is not None


def test_a_clock_says_up_to_which_step_rows_are_too_old():
    clock = EventClock(ttl_s=100)
    clock.advance(None)
    assert clock.old_step(9) < -1  # without an event there is no age
    for step, event, expected in ((19, 1000, None), (29, 1060, None), (39, 1100, 19), (49, 1159, 19)):
        clock.advance(event)
        old_step = clock.old_step(step)
        assert old_step == expected if expected is not None else old_step < -1
    clock.advance(500)  # what comes late does not turn it back
    clock.advance(1160)
    assert clock.old_step(59) == 29


def test_a_clock_that_stands_remembers_one_eviction_of_its_time():
    clock = EventClock(ttl_s=100)
    for step in range(9, 99, 10):
        clock.advance(1000)
        clock.old_step(step)
    assert clock.state.times == ((89, 1000),)
    clock.advance(1100)
    assert clock.old_step(99) == 89


def test_a_clock_goes_on_where_a_snapshot_left_it():
    clock, times = EventClock(ttl_s=60), np.random.default_rng(0).integers(0, 300, 40)
    for step, time in enumerate(times[:20].tolist()):
        clock.advance(time + 3 * step)
        clock.old_step(step)
    again = EventClock(ttl_s=60, state=ClockState.latest(ClockState(), clock.state))
    for step, time in enumerate(times[20:].tolist(), 20):
        for each in (clock, again):
            each.advance(time + 3 * step)
        assert clock.old_step(step) == again.old_step(step)
    assert len(clock.state.times) <= 40


def test_ids_are_known_from_the_first_beginning_on():
    known = IdsSince(share=4)
    known.add(array(1), 0, num_rows=100)
    assert not known.is_on
    assert known.since(0) is None
    known.begin(0)
    known.add(array(2, 3), 1, 100)
    known.begin(1)
    known.add(array(3, 4), 2, 100)
    assert (known.is_on, known.newest, known.num_bytes) == (True, 1, 32)
    assert [ids_K.tolist() for ids_K in known.since(0)] == [[2, 3], [3, 4]]
    assert [ids_K.tolist() for ids_K in known.since(1)] == [[3, 4]]
    assert [ids_K.tolist() for ids_K in known.between(0, 1)] == [[2, 3]]
    assert known.since(-1) is None


def test_ids_that_nobody_will_ask_for_take_no_memory():
    known = IdsSince(share=4)
    known.begin(0)
    for step in (1, 2, 3):
        known.add(array(step), step, 100)
    known.forget(2)
    assert known.num_bytes == 8
    assert known.since(1) is None
    assert [ids_K.tolist() for ids_K in known.since(2)] == [[3]]


@pytest.mark.parametrize(("num_rows", "most"), [(0, 10), (100, 25)])
def test_too_many_ids_are_forgotten_until_the_next_beginning(monkeypatch, num_rows, most):
    monkeypatch.setattr(ids_since, "_LEAST_IDS", 10)
    known = IdsSince(share=4)
    known.begin(0)
    known.add(np.arange(most), 1, num_rows)
    assert known.knows(0)
    known.add(array(99), 2, num_rows)
    assert (known.knows(0), known.is_on, known.num_bytes) == (False, False, 0)
    known.add(array(5), 3, num_rows)
    known.begin(3)
    known.add(array(6), 4, num_rows)
    assert known.since(0) is None
    assert [ids_K.tolist() for ids_K in known.since(3)] == [[6]]

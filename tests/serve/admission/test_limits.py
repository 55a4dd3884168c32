"""Who is admitted, and how long the others are asked to wait."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.serve.admission.limits import (
    Admissions,
    CallerLimitError,
    Callers,
    ConcurrencyLimit,
    ServiceLimitError,
    TokenBucket,
)
from rayrec.serve.config.admission import CallersConfig, LimitConfig
from tests.serve.admission.clocks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@given(
    rate=st.floats(0.1, 1000),
    burst=st.integers(1, 20),
    pauses=st.lists(st.floats(0, 3) | st.just(0.0), min_size=1, max_size=60),
)
def test_within_any_time_a_bucket_gives_at_most_burst_and_rate_times_time(rate, burst, pauses):
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    given_at = []
    for pause in pauses:
        clock.now += pause
        if bucket.take():
            given_at.append(clock.now)

    assert len(given_at) >= 1
    for (first, began), (last, ended) in combinations(enumerate(given_at), 2):
        assert last - first + 1 <= burst + rate * (ended - began) + 1e-6


@given(rate=st.floats(0.1, 1000), burst=st.integers(1, 5))
def test_whoever_waits_as_long_as_was_said_gets_a_token_and_not_before(rate, burst):
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    assert [bucket.take() for _ in range(burst + 1)] == [True] * burst + [False]

    wait_s = bucket.wait_s()
    clock.now += 0.9 * wait_s
    early = bucket.take()
    clock.now += 0.1 * wait_s

    assert wait_s == pytest.approx(1 / rate)
    assert (early, bucket.take(), bucket.take()) == (False, True, False)


def test_a_clock_that_goes_back_gives_nothing(clock):
    bucket = TokenBucket(1.0, 1, clock)
    assert bucket.take()
    clock.now -= 50
    assert not bucket.take()
    clock.now += 50
    assert not bucket.take()


def test_places_are_counted_and_each_is_given_back_once(clock):
    limit = ConcurrencyLimit(2, clock)
    release, stay = limit.enter(), limit.enter()
    assert (limit.in_flight, limit.wait_s() > 0) == (2, True)

    release()
    release()
    assert (limit.in_flight, limit.wait_s()) == (1, 0.0)
    stay()
    assert limit.in_flight == 0


def test_a_place_is_expected_after_as_long_as_they_are_held(clock):
    limit = ConcurrencyLimit(2, clock)
    release = limit.enter()
    clock.now += 8.0
    release()
    limit.enter(), limit.enter()

    assert limit.wait_s() == pytest.approx(4.0)


def test_without_limits_everything_is_admitted_and_counted(clock):
    admissions = Admissions(LimitConfig(), CallersConfig(), clock)

    releases = [admissions.admit("ann") for _ in range(1000)]

    assert admissions.service.concurrency.in_flight == 1000
    for release in releases:
        release()
    assert admissions.service.concurrency.in_flight == 0


def test_one_caller_is_refused_and_another_is_not(clock):
    admissions = Admissions(LimitConfig(), CallersConfig(rate=0.5, burst=2), clock)
    admissions.admit("ann"), admissions.admit("ann")

    with pytest.raises(CallerLimitError) as refused:
        admissions.admit("ann")
    admissions.admit("bob")

    assert refused.value.retry_after_s == 2
    assert str(refused.value) == (
        "of this caller, more than 0.5 requests a second have come; try again in 2 seconds"
    )
    assert (admissions.num_refused_callers, admissions.num_refused) == (1, 0)
    clock.now += 2
    admissions.admit("ann")


def test_a_caller_has_so_many_in_flight_and_may_come_again_when_one_is_done(clock):
    admissions = Admissions(LimitConfig(), CallersConfig(concurrency=1), clock)
    release = admissions.admit("ann")

    with pytest.raises(CallerLimitError, match=r"1 requests are in flight already; try again in 1 second$"):
        admissions.admit("ann")
    release()
    admissions.admit("ann")


def test_what_the_service_refuses_costs_its_caller_nothing(clock):
    admissions = Admissions(LimitConfig(concurrency=1), CallersConfig(rate=0.001, burst=2), clock)
    release = admissions.admit("ann")
    for _ in range(5):
        with pytest.raises(ServiceLimitError, match="of all callers, 1 requests are in flight"):
            admissions.admit("ann")
    release()

    admissions.admit("ann")  # the second of two

    assert admissions.num_refused == 5


def test_what_its_caller_may_not_costs_the_service_nothing(clock):
    admissions = Admissions(LimitConfig(rate=0.001, burst=2), CallersConfig(concurrency=1), clock)
    admissions.admit("ann")
    with pytest.raises(CallerLimitError):
        admissions.admit("ann")

    admissions.admit("bob")

    with pytest.raises(ServiceLimitError):
        admissions.admit("cid")


def test_the_caller_who_was_away_longest_is_forgotten(clock):
    callers = Callers(CallersConfig(rate=0.001, burst=1, most_kept=2), clock)
    ann, bob = callers.of("ann"), callers.of("bob")
    assert callers.of("ann") is ann

    callers.of("cid")

    assert len(callers) == 2
    assert callers.of("ann") is ann
    assert callers.of("bob") is not bob


def test_a_caller_with_requests_in_flight_is_not_forgotten(clock):
    callers = Callers(CallersConfig(concurrency=1, most_kept=1), clock)
    ann = callers.of("ann")
    (release,) = ann.enter()

    callers.of("bob"), callers.of("cid")

    assert callers.of("ann") is ann
    release()
    callers.of("dan")
    assert len(callers) == 1


def test_the_requests_of_a_message_are_admitted_together_or_none_is(clock):
    admissions = Admissions(LimitConfig(), CallersConfig(rate=1.0, burst=4, concurrency=4), clock)
    first, second, third = admissions.admit_all("ann", 3)

    with pytest.raises(CallerLimitError, match=r"3 requests are in flight already, .* counts as 2"):
        admissions.admit_all("ann", 2)
    first(), second()
    with pytest.raises(CallerLimitError, match=r"a second have come, .* counts as 2") as late:
        admissions.admit_all("ann", 2)
    assert late.value.wait_s == pytest.approx(1.0)
    admissions.admit("ann")()  # the token that neither of them took
    clock.now += 2
    for release in (third, *admissions.admit_all("ann", 2)):
        release()
    assert admissions.service.concurrency.in_flight == 0


@pytest.mark.parametrize(
    ("service", "callers", "most"),
    [
        ({}, {}, None),
        ({"concurrency": 8}, {}, 8),
        ({"concurrency": 8}, {"rate": 2.5}, 3),
        ({"rate": 100, "burst": 5}, {"concurrency": 6}, 5),
    ],
)
def test_a_message_has_at_most_what_every_limit_admits_after_a_pause(clock, service, callers, most):
    admissions = Admissions(LimitConfig(**service), CallersConfig(**callers), clock)

    assert admissions.most_at_once == most
    if most is not None:
        assert len(admissions.admit_all("ann", most)) == most


def test_who_is_only_asked_about_is_not_remembered(clock):
    admissions = Admissions(LimitConfig(), CallersConfig(rate=0.001, burst=1, most_kept=2), clock)
    admissions.admit("ann")

    for stranger in range(5):
        admissions.check(stranger)

    assert len(admissions.callers) == 1
    with pytest.raises(CallerLimitError):
        admissions.check("ann")


class CountedAdmissions(Admissions):
    """Counts how often its limits are looked at."""

    def __init__(self, *args):
        super().__init__(*args)
        self.num_looked = 0
        look = self.service.refusal

        def counted(count=1):
            self.num_looked += 1
            return look(count)

        self.service.refusal = counted


def test_limits_are_looked_at_once_for_a_message_that_found_room(clock):
    admissions = CountedAdmissions(LimitConfig(rate=1.0, burst=3), CallersConfig(), clock)

    room = admissions.check("ann")
    admissions.admit_all("ann", 1, room)

    assert admissions.num_looked == 1


@pytest.mark.parametrize("count", [1, 2])
def test_room_that_others_took_meanwhile_is_looked_for_again(clock, count):
    admissions = Admissions(LimitConfig(concurrency=count), CallersConfig(), clock)
    room = admissions.check("ann")
    admissions.admit("bob")

    with pytest.raises(ServiceLimitError):
        admissions.admit_all("ann", count, room)


def test_room_for_one_is_none_for_more(clock):
    admissions = Admissions(LimitConfig(concurrency=1), CallersConfig(), clock)

    with pytest.raises(ServiceLimitError):
        admissions.admit_all("ann", 2, admissions.check("ann"))


@given(names=st.lists(st.integers(0, 50), max_size=200))
def test_no_more_callers_are_kept_than_may(names):
    callers = Callers(CallersConfig(rate=1.0, most_kept=3), Clock())
    for name in names:
        callers.of(name)
        assert len(callers) <= 3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"burst": 3}, "burst is 3 without a rate"),
        ({"rate": 0}, "rate: input should be greater than 0"),
        ({"concurrency": 0}, "concurrency: input should be greater than or equal to 1"),
    ],
)
def test_limits_that_mean_nothing_are_refused(values, sentence):
    with pytest.raises(InputError, match=sentence):
        LimitConfig.parse(values)

"""What happens to a request before the model: refused, degraded, answered from before, or just computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from rayrec.pipelines.inference.answers import FULL_BUDGET, Budget
from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.limits import CallerLimitError, ServiceLimitError
from rayrec.serve.admission.request_info import RequestInfo
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.allocation import AllocateConfig
from rayrec.serve.engine.allocation import Allocator
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher, DeadlineError, TooManyWaitingError
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import RefusedRequestError
from rayrec.serve.wire.deadlines import HEADER, HeaderError
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest
from tests.serve.admission.clocks import Clock
from tests.serve.fake_recommender import WIDTH, FakeRecommender

ANN = {"X-Caller-Key": "ann"}
MAX_WAITING = 4


class Model:
    """A service whose model computes when it is let, and what a test asks of it."""

    def __init__(self, config: dict[str, Any], allocator: Allocator | None = None) -> None:
        self.recommender = FakeRecommender()
        self.service = RecommendationService(self.recommender, max_k=50)
        self.clock = Clock()
        self._may_compute = threading.Event()
        self._may_compute.set()
        self._entered = threading.Semaphore(0)
        costs = BatchCosts({1: 1.0}, WIDTH)
        self.batcher = Batcher(self._compute, costs, MAX_WAITING, clock=self.clock)
        self.admission = AdmissionControl(
            AdmissionConfig.parse(config), self.service, self.batcher, 10.0, self.clock, allocator=allocator
        )

    def _compute(self, requests: Sequence[RecommendRequest]) -> Sequence[RecommendAnswer | Exception]:
        self._entered.release()
        assert self._may_compute.wait(timeout=10)
        return self.service.recommend_all(requests)

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> RecommendAnswer:
        return await self.admission.begin(RecommendRequest(**fields), self.info(headers))

    def info(self, headers: dict[str, str] | None = None, address: str = "10.0.0.1") -> RequestInfo:
        return self.admission.read_headers(headers or {}, address)

    async def occupy(self, num_requests: int) -> list[asyncio.Task[RecommendAnswer]]:
        """So many requests in flight, the first of which is being computed, until `free`."""
        self._may_compute.clear()
        tasks = []
        for _ in range(num_requests):
            tasks.append(asyncio.create_task(self.ask(history=["brazil"], k=1)))
            await asyncio.sleep(0)
        if tasks:
            assert await asyncio.to_thread(self._entered.acquire, timeout=10)
        return tasks

    def free(self) -> None:
        self._may_compute.set()

    async def idle(self) -> None:
        """Its thread is done with what it has answered a moment after the answers are there."""
        while self.batcher.in_flight:
            await asyncio.sleep(0)

    def close(self) -> None:
        self.free()
        self.batcher.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Model]]:
    started: list[Model] = []

    def begin(allocator: Allocator | None = None, **config: Any) -> Model:
        started.append(Model(config, allocator))
        return started[-1]

    yield begin
    for model in started:
        model.close()


def run(scenario: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scenario, timeout=20)

    return asyncio.run(bounded())


def step(do: str, enter: float, to: int | None = None) -> dict[str, Any]:
    return {"do": do, "to": to, "enter": enter, "leave": enter - 0.1}


def degrade(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"steps": list(steps), **more}


ALWAYS = 0.2
"""A single request is a quarter of the capacity."""


def test_without_settings_requests_are_computed_in_full_and_refused_by_the_batcher_alone(start):
    model = start()

    async def scenario() -> list[Any]:
        tasks = await model.occupy(MAX_WAITING)
        with pytest.raises(TooManyWaitingError):
            await model.ask()
        model.free()
        return await asyncio.gather(*tasks)

    answers = run(scenario())

    assert all(answer.degraded == [] for answer in answers)
    assert set(model.recommender.budgets) == {FULL_BUDGET}
    assert model.admission.status.in_flight == 0


def test_a_caller_is_known_by_key_and_without_one_by_address(start):
    model = start(callers={"rate": 0.001, "burst": 1})

    async def scenario() -> None:
        await model.ask(ANN)
        await model.ask({"X-Caller-Key": "bob"})
        await model.ask()
        await model.ask({"X-Caller-Key": "10.0.0.1"})  # the text of an address is another caller
        for headers in (ANN, {}):
            with pytest.raises(CallerLimitError, match="try again in 1000 seconds"):
                await model.ask(headers)
        await model.admission.begin(RecommendRequest(), model.info({}, "10.0.0.2"))

    run(scenario())
    assert (model.admission.status.callers, model.admission.status.refused_callers) == (5, 2)


def test_the_header_of_the_key_can_be_another(start):
    model = start(callers={"rate": 0.001, "burst": 1, "header": "X-Api-Key"})

    async def scenario() -> None:
        await model.ask({"X-Api-Key": "ann"})
        await model.ask({"X-Api-Key": "bob"} | ANN)
        with pytest.raises(CallerLimitError):
            await model.ask({"X-Api-Key": "ann"})

    run(scenario())


def test_a_key_that_is_too_long_to_keep_is_refused(start):
    model = start(callers={"rate": 1})
    run(model.ask({"X-Caller-Key": "a" * 256}))
    with pytest.raises(HeaderError, match="X-Caller-Key: expected at most 256 characters, got 257"):
        run(model.ask({"X-Caller-Key": "a" * 257}))
    assert model.admission.status.callers == 1


def test_a_full_service_refuses_and_takes_again_what_comes_when_one_is_done(start):
    model = start(service={"concurrency": 2})

    async def scenario() -> None:
        tasks = await model.occupy(2)
        with pytest.raises(ServiceLimitError):
            await model.ask()
        assert model.admission.status.in_flight == 2
        model.free()
        await asyncio.gather(*tasks)
        await model.ask()

    run(scenario())
    assert (model.admission.status.in_flight, model.admission.status.refused) == (0, 1)


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"k": 51}, RefusedRequestError), ({"history": ["alien"], "rank": True}, RefusedRequestError)],
)
def test_a_place_is_given_back_whatever_becomes_of_the_request(start, fields, error):
    model = start(service={"concurrency": 1})

    async def scenario() -> None:
        for _ in range(3):
            with pytest.raises(error):
                await model.ask(**fields)

    run(scenario())
    assert model.admission.status.in_flight == 0


def test_limits_count_a_request_by_what_it_takes(start):
    """One with four times the beams is four, and one that is more than all is all."""
    model = start(service={"concurrency": 6}, callers={"rate": 0.001, "burst": 5})
    model.service.width_of = model.service.group_of = lambda request: WIDTH * max(request.k // 10, 1)

    async def scenario() -> tuple[int, int]:
        tasks = await model.occupy(1)
        wide = asyncio.create_task(model.ask(ANN, k=40))
        await asyncio.sleep(0)
        in_flight = model.admission.status.in_flight
        with pytest.raises(CallerLimitError, match="what comes counts as 4"):
            await model.ask(ANN, k=40)
        with pytest.raises(ServiceLimitError, match="5 requests are in flight already, and what comes"):
            await model.ask({"X-Caller-Key": "bob"}, k=40)
        model.free()
        await asyncio.gather(*tasks, wide)
        await model.idle()
        # Five come at once at most: a message of two that would be eight is five.
        both = [RecommendRequest(k=40)] * 2
        info = model.info({"X-Caller-Key": "cid"})
        info.expires_at += 100.0  # limits are looked at, whether the first is being computed by then or not
        await asyncio.gather(*model.admission.begin_all(both, info))
        await model.idle()
        return in_flight, model.admission.status.in_flight

    assert run(scenario()) == (5, 0)


def test_what_the_batcher_refuses_gives_its_place_back(start):
    model = start(service={"concurrency": 9})

    async def scenario() -> int:
        tasks = await model.occupy(MAX_WAITING)
        with pytest.raises(TooManyWaitingError):
            await model.ask()
        in_flight = model.admission.status.in_flight
        model.free()
        await asyncio.gather(*tasks)
        return in_flight

    assert run(scenario()) == MAX_WAITING


def test_a_caller_who_leaves_holds_its_place_until_the_model_is_done(start):
    model = start(service={"concurrency": 1})

    async def scenario() -> None:
        (task,) = await model.occupy(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(ServiceLimitError):
            await model.ask()
        model.free()
        await model.idle()
        await model.ask()

    run(scenario())


def test_a_request_may_bring_an_earlier_deadline_than_the_service_has(start):
    model = start()

    async def scenario() -> tuple[list[Any], RecommendAnswer]:
        (first,) = await model.occupy(1)
        wanted = [{HEADER: "3000"}, {HEADER: "60000"}, {}]
        tasks = [asyncio.create_task(model.ask(headers, user_id="ann")) for headers in wanted]
        await asyncio.sleep(0)
        model.clock.now += 5  # each would take 1
        model.free()
        return await asyncio.gather(*tasks, return_exceptions=True), await first

    (soon, late, whenever), _ = run(scenario())

    assert isinstance(soon, DeadlineError)
    assert (late.source, whenever.source) == ("model", "model")


def test_the_time_that_a_body_took_to_come_counts(start):
    model = start()

    async def scenario() -> Any:
        late = model.info({HEADER: "3000"})
        model.clock.now += 4
        return await asyncio.gather(
            model.admission.begin(RecommendRequest(user_id="ann"), late), return_exceptions=True
        )

    assert isinstance(run(scenario())[0], DeadlineError)


def test_a_request_cannot_wait_longer_than_the_service_lets_it(start):
    model = start()

    async def scenario() -> Any:
        await model.occupy(1)
        task = asyncio.create_task(model.ask({HEADER: "60000"}, user_id="ann"))
        await asyncio.sleep(0)
        model.clock.now += 11
        model.free()
        return await asyncio.gather(task, return_exceptions=True)

    assert isinstance(run(scenario())[0], DeadlineError)


def test_steps_come_with_the_requests_in_flight_and_go_with_them(start):
    model = start(degrade=degrade(step("fewer_beams", 0.7, to=3), step("shorter_history", 0.9, to=1)))

    async def scenario() -> list[RecommendAnswer]:
        tasks = await model.occupy(2)  # a quarter, two quarters
        for _ in range(2):  # three quarters; all
            tasks.append(asyncio.create_task(model.ask(user_id="ann", k=1)))
            await asyncio.sleep(0)
        assert model.admission.status.steps == ("fewer_beams", "shorter_history")
        assert model.admission.status.load == 1.0
        model.free()
        answers = await asyncio.gather(*tasks)
        await model.idle()
        # Who looks sees what is so now, though nobody has asked since.
        assert (model.admission.status.load, model.admission.status.steps) == (0.0, ())
        return [*answers, await model.ask(user_id="ann", k=1)]

    answers = run(scenario())

    assert [answer.degraded for answer in answers] == [
        [],
        [],
        ["fewer_beams"],
        ["fewer_beams", "shorter_history"],
        [],
    ]
    assert model.admission.status.steps == ()
    assert Budget(3, None) in model.recommender.budgets
    assert Budget(3, 1) in model.recommender.budgets


def test_load_may_be_the_wait_by_what_batches_take(start):
    model = start(degrade=degrade(step("fewer_beams", 0.15, to=3), by="wait"))

    async def scenario() -> list[float]:
        loads = []
        tasks = []
        for num in range(3):
            tasks += await model.occupy(1) if not num else [asyncio.create_task(model.ask(user_id="ann"))]
            await asyncio.sleep(0)
            loads.append(model.admission.status.load)
        model.free()
        await asyncio.gather(*tasks)
        return loads

    assert run(scenario()) == [0.1, 0.2, 0.3]  # each takes 1 of 10 seconds
    assert model.recommender.budgets[-1] == Budget(3, None)  # 0.2 when the last one came


@pytest.mark.parametrize("done", ["fewer_beams", "popular_items", "cached_answer"])
def test_a_degraded_service_counts_the_work_that_it_was_asked_for(start, done):
    """Else its replicas would be taken away, since it answers with less."""
    asked, degraded = (
        start(),
        start(degrade=degrade(step(done, ALWAYS, 1 if done == "fewer_beams" else None))),
    )
    for model in (asked, degraded):
        model.batcher.costs.observe(1, 1, 0.1)  # of a search with one beam
        model.batcher.costs.observe(0, 1, 0.001)  # of popular items

    async def scenario(model: Model) -> list[RecommendAnswer]:
        return [await model.ask(user_id="ann", k=1) for _ in range(3)]

    run(scenario(asked))
    answers = run(scenario(degraded))
    assert answers[-1].degraded == [done]
    assert degraded.batcher.load.work == pytest.approx(asked.batcher.load.work, rel=0.2)


def test_the_services_own_limit_is_capacity_too(start):
    model = start(service={"concurrency": 2}, degrade=degrade(step("popular_items", 0.9)))

    async def scenario() -> list[RecommendAnswer]:
        tasks = await model.occupy(1)
        tasks.append(asyncio.create_task(model.ask(user_id="ann", k=1)))
        await asyncio.sleep(0)
        model.free()
        return await asyncio.gather(*tasks)

    first, second = run(scenario())
    assert (first.source, second.source, second.degraded) == ("model", "popular", ["popular_items"])


def test_a_kept_answer_is_given_without_the_model_until_it_is_too_old(start):
    model = start(degrade=degrade(step("cached_answer", ALWAYS), cache={"max_age_s": 60}))

    async def scenario() -> list[RecommendAnswer]:
        first = await model.ask(user_id="ann", k=1)
        again = await model.ask(user_id="ann", k=1)
        other = await model.ask(user_id="ann", k=2)
        model.clock.now += 61
        return [first, again, other, await model.ask(user_id="ann", k=1)]

    first, again, other, later = run(scenario())

    assert [a.degraded for a in (first, again, other, later)] == [[], ["cached_answer"], [], []]
    assert again.items == first.items
    assert len(other.items) == 2
    assert len(model.recommender.asked) == 3
    assert (model.admission.status.cache_hits, model.admission.status.cached) == (1, 2)
    assert model.admission.status.in_flight == 0


def test_a_kept_answer_needs_no_place_at_the_model(start):
    model = start(degrade=degrade(step("cached_answer", 0.9)))

    async def scenario() -> RecommendAnswer:
        await model.ask(user_id="ann", k=1)
        await model.idle()
        tasks = await model.occupy(MAX_WAITING)
        with pytest.raises(TooManyWaitingError):
            await model.ask(user_id="ann", k=2)
        kept = await model.ask(user_id="ann", k=1)
        model.free()
        await asyncio.gather(*tasks)
        return kept

    assert run(scenario()).degraded == ["cached_answer"]


def test_a_kept_answer_is_not_given_while_there_is_little_to_do(start):
    model = start(degrade=degrade(step("cached_answer", 0.9)))

    async def scenario() -> list[list[str]]:
        return [(await model.ask(user_id="ann", k=1)).degraded for _ in range(2)]

    assert run(scenario()) == [[], []]
    assert len(model.recommender.asked) == 2


def test_a_kept_answer_says_what_was_lowered_when_it_was_computed(start):
    model = start(degrade=degrade(step("fewer_beams", ALWAYS, to=3), step("cached_answer", ALWAYS)))

    async def scenario() -> list[list[str]]:
        return [(await model.ask(user_id="ann", k=1)).degraded for _ in range(3)]

    assert run(scenario()) == [["fewer_beams"]] + 2 * [["fewer_beams", "cached_answer"]]


def test_near_line_answers_are_not_kept_beside_their_store(start, monkeypatch):
    model = start(degrade=degrade(step("cached_answer", ALWAYS)))
    computed = model.service.recommend_all

    def near_line(requests):
        changes = {"source": "nearline", "degraded": ["cached_answer"]}
        return [answer.model_copy(update=changes) for answer in computed(requests)]

    monkeypatch.setattr(model.service, "recommend_all", near_line)

    async def scenario() -> list[list[str]]:
        return [(await model.ask(user_id="ann", k=1)).degraded for _ in range(2)]

    assert run(scenario()) == [["cached_answer"]] * 2
    assert model.admission.status.cached == 0


def test_popular_items_of_a_busy_moment_are_not_kept(start):
    model = start(degrade=degrade(step("cached_answer", ALWAYS), step("popular_items", ALWAYS)))

    async def scenario() -> list[list[str]]:
        return [(await model.ask(user_id="ann", k=1)).degraded for _ in range(2)]

    assert run(scenario()) == [["popular_items"]] * 2
    assert model.admission.status.cached == 0


def ask_all(model: Model, num_rows: int, **fields: Any) -> list[asyncio.Future[RecommendAnswer]]:
    return model.admission.begin_all([RecommendRequest(k=1, **fields)] * num_rows, model.info())


def test_a_message_of_rows_that_the_batcher_refuses_has_taken_nothing(start):
    model = start(callers={"rate": 0.001, "burst": 4})

    async def scenario() -> None:
        tasks = await model.occupy(1)
        for _ in range(3):
            with pytest.raises(TooManyWaitingError, match="1 requests are waiting already, and 4 of one"):
                model.admission.begin_all([RecommendRequest()] * 4, model.info({}, "10.0.0.2"))
        model.free()
        await asyncio.gather(*tasks)
        await model.idle()
        await asyncio.gather(*model.admission.begin_all([RecommendRequest()] * 4, model.info({}, "10.0.0.2")))

    run(scenario())


def test_rows_that_would_be_late_give_back_what_those_before_them_took(start):
    model = start(callers={"rate": 0.001, "burst": 3}, service={"concurrency": 4})
    late = {HEADER: "2500"}  # each takes a second

    async def scenario() -> None:
        tasks = await model.occupy(1)
        with pytest.raises(DeadlineError):
            model.admission.begin_all([RecommendRequest()] * 3, model.info(late, "10.0.0.2"))
        assert (model.admission.status.in_flight, model.batcher.in_flight) == (1, 1)
        model.free()
        await asyncio.gather(*tasks)
        await model.idle()
        await asyncio.gather(*model.admission.begin_all([RecommendRequest()] * 3, model.info({}, "10.0.0.2")))

    run(scenario())
    assert len(model.recommender.asked) == 1  # of the history; the others have none


def test_rows_of_a_message_are_degraded_as_one_after_the_other_would_be(start):
    model = start(service={"concurrency": 4}, degrade=degrade(step("popular_items", 0.7)))

    async def scenario() -> list[RecommendAnswer]:
        return await asyncio.gather(*ask_all(model, 4, user_id="ann"))

    assert [answer.degraded for answer in run(scenario())] == [[], [], ["popular_items"], ["popular_items"]]


def test_rows_of_a_message_do_not_count_as_waiting_for_each_other(start):
    model = start()

    async def scenario() -> None:
        tasks = await model.occupy(1)
        rows = model.admission.begin_all([RecommendRequest(k=1)] * 3, model.info())
        model.clock.now += 1.0
        model.free()
        await asyncio.gather(*tasks, *rows)

    run(scenario())
    model.batcher.close()
    assert model.batcher.load.queue_wait_s == pytest.approx(0.5)  # of the first one, and the one in flight


def test_rows_that_have_an_answer_of_before_need_no_place(start):
    model = start(degrade=degrade(step("cached_answer", ALWAYS)))

    async def scenario() -> list[RecommendAnswer]:
        await model.ask(user_id="ann", k=1)
        tasks = await model.occupy(MAX_WAITING - 1)
        kept = await asyncio.gather(*ask_all(model, 4, user_id="ann"))
        model.free()
        await asyncio.gather(*tasks)
        return kept

    assert [answer.degraded for answer in run(scenario())] == [["cached_answer"]] * 4


def make_allocator() -> Allocator:
    """Whose device second is worth 100."""
    actions = ({"name": "full"}, {"name": "popular", "popular": True})
    config = AllocateConfig(actions=actions, curves="", explore=0.0, floor_every=0)  # type: ignore[arg-type]
    found, costs = [1.0, 0.0], [0.1, 0.001]
    allocator = Allocator(config, lambda *_: found, lambda: costs, lambda: 0.0, lambda: 0.0)
    allocator.price.value = 100.0
    return allocator


def worth(value: str) -> dict[str, str]:
    return {"X-Request-Value": value}


def test_the_last_room_is_for_requests_that_are_worth_most(start):
    model = start(make_allocator())

    async def scenario() -> None:
        for value in range(1, 50):
            await model.ask(worth(str(1000 * value)), history=["brazil"])
        tasks = await model.occupy(MAX_WAITING)
        poor, rich = model.info(worth("1")), model.info(worth("1000000"))
        with pytest.raises(ServiceLimitError, match="other requests are worth more"):
            model.admission.check_room(poor)
        with pytest.raises(TooManyWaitingError):  # whatever it is worth, there is no room
            model.admission.check_room(rich)
        model.free()
        await asyncio.gather(*tasks)

    run(scenario())
    assert (model.admission.status.refused, model.admission.status.in_flight) == (1, 0)


def test_a_kept_answer_needs_no_room(start):
    model = start(make_allocator(), degrade=degrade(step("cached_answer", ALWAYS)))

    async def scenario() -> list[str]:
        for value in range(1, 50):
            await model.ask(worth(str(1000 * value)), history=["brazil"], k=2)
        tasks = await model.occupy(MAX_WAITING)
        poor = model.info(worth("1"))
        model.admission.check_room(poor)
        kept = await model.admission.begin(RecommendRequest(history=["brazil"], k=2), poor)
        with pytest.raises(ServiceLimitError, match="other requests are worth more"):
            await model.ask(worth("1"), history=["brazil"], k=3)
        model.free()
        await asyncio.gather(*tasks)
        return kept.degraded

    assert run(scenario()) == ["cached_answer"]


def test_rows_of_a_message_are_not_refused_for_their_value(start):
    model = start(make_allocator())

    async def scenario() -> None:
        tasks = await model.occupy(2)
        rows = model.admission.begin_all([RecommendRequest(history=["brazil"])] * 2, model.info(worth("1")))
        model.free()
        assert [each.degraded for each in await asyncio.gather(*rows)] == [["popular_items"]] * 2
        await asyncio.gather(*tasks)

    run(scenario())


def test_a_request_is_charged_unless_it_took_nothing(start):
    allocator = make_allocator()
    model = start(allocator)

    async def scenario() -> None:
        with pytest.raises(RefusedRequestError):
            await model.ask(worth("1000"), history=["brazil"], k=51)
        assert allocator._spent_s == pytest.approx(0.0)
        tasks = await model.occupy(1)
        late = asyncio.create_task(model.ask(worth("1000") | {HEADER: "5000"}, history=["brazil"]))
        await asyncio.sleep(0)
        spent_s = allocator._spent_s
        model.clock.now += 6.0
        model.free()
        with pytest.raises(DeadlineError):
            await late
        await asyncio.gather(*tasks)
        assert allocator._spent_s == spent_s > 0.1  # it kept others from the device

    run(scenario())

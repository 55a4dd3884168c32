"""A shadow is asked, and nobody notices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayrec.serve.config.services import ShadowConfig
from rayrec.serve.routing.shadow import Shadow, ShadowCounts, Shadowed


async def answered(request: str) -> str:
    return f"answer to {request}"


def in_a_loop(scenario: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), timeout=20))


async def until_idle(shadow: Shadow[str]) -> None:
    while shadow.in_flight:
        await asyncio.sleep(0)


def test_the_shadow_gets_every_request_and_its_answers_are_thrown_away():
    asked = []

    async def send(request: str) -> str:
        asked.append(request)
        return "another answer"

    async def scenario() -> tuple[list[str], ShadowCounts]:
        shadow = Shadow(send, ShadowConfig(share=1.0))
        target = Shadowed(answered, shadow)
        answers = [await target(name) for name in "ab"]
        await until_idle(shadow)
        return answers, shadow.counts

    answers, counts = in_a_loop(scenario)

    assert answers == ["answer to a", "answer to b"]
    assert asked == ["a", "b"]
    assert counts == ShadowCounts(sent=2, answered=2)


def test_a_shadow_that_hangs_delays_nobody_and_holds_no_more_than_its_places():
    async def scenario() -> tuple[list[str], int, ShadowCounts, int]:
        never = asyncio.Event()

        async def hang(request: str) -> None:
            await never.wait()

        shadow = Shadow(hang, ShadowConfig(share=1.0, max_in_flight=3))
        target = Shadowed(answered, shadow)
        answers = [await target(str(number)) for number in range(10)]
        in_flight, counts = shadow.in_flight, shadow.counts
        await shadow.close()
        return answers, in_flight, counts, shadow.in_flight

    answers, in_flight, counts, after = in_a_loop(scenario)

    assert answers == [f"answer to {number}" for number in range(10)]
    assert (in_flight, counts) == (3, ShadowCounts(sent=3, dropped=7))
    assert after == 0


def test_a_shadow_that_does_not_answer_in_time_leaves_its_place():
    async def scenario() -> tuple[ShadowCounts, int]:
        async def hang(request: str) -> None:
            await asyncio.Event().wait()

        shadow = Shadow(hang, ShadowConfig(share=1.0, timeout_s=1e-6))
        shadow.offer("a")
        await until_idle(shadow)
        return shadow.counts, shadow.in_flight

    assert in_a_loop(scenario) == (ShadowCounts(sent=1, failed=1), 0)


def raise_at_once(request: str) -> Awaitable[str]:
    raise ConnectionError(request)


async def raise_later(request: str) -> str:
    await asyncio.sleep(0)
    raise ConnectionError(request)


@pytest.mark.parametrize("send", [raise_at_once, raise_later])
def test_errors_of_a_shadow_are_counted_and_not_raised(send, caplog):
    async def scenario() -> tuple[list[str], ShadowCounts]:
        shadow = Shadow(send, ShadowConfig(share=1.0, max_in_flight=100))
        target = Shadowed(answered, shadow)
        answers = [await target(str(number)) for number in range(9)]
        await until_idle(shadow)
        return answers, shadow.counts

    with caplog.at_level(logging.WARNING):
        answers, counts = in_a_loop(scenario)

    assert answers == [f"answer to {number}" for number in range(9)]
    assert counts == ShadowCounts(sent=9, failed=9)
    assert len(caplog.records) == 4  # the 1st, 2nd, 4th and 8th


def test_an_error_of_the_target_reaches_its_caller_and_the_shadow_is_asked_all_the_same():
    async def scenario() -> ShadowCounts:
        shadow = Shadow(answered, ShadowConfig(share=1.0))
        with pytest.raises(ConnectionError):
            await Shadowed(raise_later, shadow)("a")
        await until_idle(shadow)
        return shadow.counts

    assert in_a_loop(scenario) == ShadowCounts(sent=1, answered=1)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.3, 240, 360), (1.0, 1000, 1000)])
def test_a_share_is_sent_that_the_seed_draws(share, least, most):
    async def scenario(seed: int) -> list[int]:
        asked: list[int] = []

        async def send(request: int) -> None:
            asked.append(request)

        shadow = Shadow(send, ShadowConfig(share=share, seed=seed, max_in_flight=10_000))
        for number in range(1000):
            shadow.offer(number)
        await until_idle(shadow)
        return asked

    first, again, other = (in_a_loop(lambda seed=seed: scenario(seed)) for seed in (0, 0, 1))

    assert least <= len(first) <= most
    assert first == again
    assert (first == other) == (share in (0.0, 1.0))

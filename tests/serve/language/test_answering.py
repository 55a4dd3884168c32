"""Callers that go away while their answers are computed."""

import asyncio

import pytest

from rayrec.serve.language.answering import unless_gone
from rayrec.serve.wire.errors import RequestError


class Connection:
    """Of a caller that goes away when it is told to."""

    def __init__(self, error=None):
        self.left, self.error = asyncio.Event(), error

    async def receive(self):
        await self.left.wait()
        if self.error is not None:
            raise self.error
        return {"type": "http.disconnect"}


class Work:
    """Takes until it is told to end."""

    def __init__(self):
        self.may_end, self.was_cancelled = asyncio.Event(), False

    async def do(self):
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"


def run(use):
    return asyncio.run(asyncio.wait_for(use(), 20))


@pytest.mark.parametrize("error", [None, OSError("reset")])
def test_work_for_a_caller_that_goes_away_is_cancelled_and_says_so(error):
    async def use():
        connection, work = Connection(error), Work()
        asyncio.get_running_loop().call_later(0.01, connection.left.set)
        with pytest.raises(RequestError) as refused:
            await unless_gone(connection, work.do())
        await asyncio.sleep(0)  # which would raise, were the task still to be cancelled
        return work.was_cancelled, refused.value.status, asyncio.current_task().cancelling()

    assert run(use) == (True, 499, 0)


def test_a_caller_that_goes_away_behind_its_answer_cancels_nothing():
    async def use():
        connection, work = Connection(), Work()
        # Both at once: the work is found to have ended first.
        work.may_end.set()
        connection.left.set()
        found = await unless_gone(connection, work.do())
        for _ in range(5):
            await asyncio.sleep(0)
        return found, asyncio.current_task().cancelling(), len(asyncio.all_tasks())

    found, cancelling, num_tasks = run(use)
    assert (found, cancelling) == ("done", 0)
    assert num_tasks == 2  # this one, and that which waits for it


def test_whoever_cancels_the_request_is_obeyed():
    async def use():
        connection, work = Connection(), Work()
        task = asyncio.create_task(unless_gone(connection, work.do()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return work.was_cancelled

    assert run(use)


@pytest.mark.parametrize("ends_with", ["an error", "a value"])
def test_work_that_does_not_end_by_its_cancellation_leaves_none_behind(ends_with):
    async def work():
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            if ends_with == "an error":
                raise ValueError("while it was cleaned up") from None
        return "a value"

    async def use():
        connection = Connection()
        asyncio.get_running_loop().call_later(0.01, connection.left.set)
        with pytest.raises(RequestError) as refused:
            await unless_gone(connection, work())
        await asyncio.sleep(0)
        return refused.value.status, asyncio.current_task().cancelling()

    assert run(use) == (499, 0)

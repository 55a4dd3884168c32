"""Several requests that come and are answered as one: rows of tensors, prompts of a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rayrec.platform.errors import UnavailableError
from rayrec.serve.batching import Batcher, TooManyWaitingError
from rayrec.serve.errors import RequestError
from rayrec.serve.schemas import RecommendAnswer, RecommendRequest
from rayrec.serve.service import RecommendationService, RefusedRequestError

RecommendBatcher = Batcher[RecommendRequest, RecommendAnswer]


async def answers_of_all(
    service: RecommendationService,
    batcher: RecommendBatcher,
    requests: Sequence[RecommendRequest],
    timeout_s: float,
    error_of: Callable[[int, str, int], RequestError],
) -> list[RecommendAnswer]:
    """Answers of all requests, or the error of the first that has one.

    Args:
        error_of: `error_of(place, sentence, status)`: says which request the sentence is about.

    Raises:
        RequestError: a request is refused, or what it needs does not answer.
        TooManyWaitingError: there is no place for all of them; none is computed that had not begun.
        DeadlineError: one would be answered too late.
    """
    submitted = _submitted(service, batcher, requests, timeout_s)
    found = await asyncio.gather(*map(asyncio.wrap_future, submitted), return_exceptions=True)
    answers: list[RecommendAnswer] = []
    for place, answer in enumerate(found):
        if isinstance(answer, RefusedRequestError):
            raise error_of(place, str(answer), 400) from answer
        if isinstance(answer, UnavailableError):
            sentence = f"a service that it needs does not answer: {answer}"
            raise error_of(place, sentence, 503) from answer
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


def _submitted(
    service: RecommendationService,
    batcher: RecommendBatcher,
    requests: Sequence[RecommendRequest],
    timeout_s: float,
) -> list[Future[RecommendAnswer]]:
    submitted: list[Future[RecommendAnswer]] = []
    try:
        for request in requests:
            submitted.append(batcher.submit(request, service.group_of(request), timeout_s))
    except TooManyWaitingError:
        for future in submitted:
            future.cancel()
        raise
    return submitted

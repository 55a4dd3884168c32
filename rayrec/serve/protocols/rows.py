"""Several requests that come and are answered as one: rows of tensors, prompts of a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rayrec.platform.errors import UnavailableError
from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.request_info import RequestInfo
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import RefusedRequestError
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest


async def answers_of_all(
    admission: AdmissionControl,
    pinned: RecommendationService,
    requests: Sequence[RecommendRequest],
    info: RequestInfo,
    error_of: Callable[[int, str, int], RequestError],
    request_id: str,
) -> list[RecommendAnswer]:
    """Answers of all requests, or the error of the first that has one. For limits, each of them counts.

    Args:
        pinned: the model that answers all of them.
        error_of: `error_of(row, sentence, status)`: says which request the sentence is about.
        request_id: of the message, for the log.

    Raises:
        RequestError: a request is refused, or what it needs does not answer.
        CallerLimitError, ServiceLimitError, TooManyWaitingError: not all of them are admitted,
            and none is computed.
        DeadlineError: one would be answered too late.
    """
    begun = admission.begin_all(requests, info, pinned, request_id)
    found = await asyncio.gather(*begun, return_exceptions=True)
    answers: list[RecommendAnswer] = []
    for row, answer in enumerate(found):
        if isinstance(answer, RefusedRequestError):
            raise error_of(row, str(answer), 400) from answer
        if isinstance(answer, UnavailableError):
            sentence = f"a service that it needs does not answer: {answer}"
            raise error_of(row, sentence, 503) from answer
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers

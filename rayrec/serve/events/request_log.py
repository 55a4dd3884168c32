"""What was asked and answered, for a share of the requests, in the form of training rows.

A row has `user_id` and `item_ids` as histories have them, and apart from these what was recommended; what
users then did can be joined to it by `request_id`. A request that failed has an `error`, and no history.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping

import pyarrow as pa

from rayrec.serve.config.events import RequestLogConfig
from rayrec.serve.config.models import MODEL_NAME
from rayrec.serve.events.intake import log_metrics
from rayrec.serve.events.parquet_log import ParquetLog
from rayrec.serve.wire.schemas import ModelInfo, RecommendAnswer, RecommendRequest

REQUEST_ID = "X-Request-Id"
MAX_ERROR = 200
"""Characters of an error."""
MAX_REQUEST_ID = 128
"""Characters; of a longer one, so many count."""

DECIDED = {"action": pa.string(), "propensity": pa.float64(), "value": pa.float64(), "price": pa.float64()}
"""With `admission.allocate`: what was decided, with which probability, of what value at what price."""
SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("row", pa.int64()),  # of the message: protocols have several
        ("time", pa.timestamp("us")),
        ("user_key", pa.string()),
        ("user_id", pa.int64()),
        ("item_ids", pa.list_(pa.int64())),
        ("timestamps", pa.list_(pa.int64())),
        ("k", pa.int64()),
        ("control", pa.string()),  # JSON of candidates, quotas, diversity and what became of them; or null
        ("recommended", pa.list_(pa.string())),
        ("scores", pa.list_(pa.float64())),
        ("source", pa.string()),
        ("degraded", pa.list_(pa.string())),
        ("target", pa.string()),  # of several that share the requests; null: there is one
        ("run", pa.string()),
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("latency_ms", pa.float64()),
        ("model", pa.string()),  # its name in the service
        ("error", pa.string()),  # of a request that has got no answer; null: it has
        *DECIDED.items(),
    ]
)


def request_id_of(header: str | None) -> str:
    """The id that a request came with, or a new one."""
    return (header or uuid.uuid4().hex)[:MAX_REQUEST_ID]


def is_of_share(request_id: str, share: float) -> bool:
    """Whether a request is of a share: the same wherever it is asked."""
    digest = hashlib.blake2b(request_id.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


class RequestLog:
    """Never refuses: what finds no room is counted."""

    def __init__(
        self,
        config: RequestLogConfig,
        target: str | None = None,
        clock: Callable[[], float] = time.time,
        model_name: str = MODEL_NAME,
    ) -> None:
        """
        Args:
            target: that answers, where there are several.
            model_name: of the model in the service.
        """
        self._share, self._target, self._clock = config.share, target, clock
        self._model_name = model_name
        self.log = ParquetLog(config.folder, SCHEMA, config.roll_s, config.roll_rows, config.max_queued)

    def wants(self, request_id: str) -> bool:
        """Whether the request is of the share."""
        return is_of_share(request_id, self._share)

    def answered(
        self,
        request_id: str,
        row: int,
        request: RecommendRequest,
        began: float,
        answered: asyncio.Future[RecommendAnswer],
        decided: Mapping[str, object] | None = None,
        model: ModelInfo | None = None,
    ) -> None:
        """Take down what became of a request; nothing where nobody waited for it.

        Args:
            began: by `time.perf_counter`.
            decided: by the request's value, by column: `DECIDED`; None where nothing was.
            model: that was asked; None takes down no request without an answer.
        """
        seconds = time.perf_counter() - began
        if answered.cancelled():
            return
        if (error := answered.exception()) is not None:
            if model is not None:
                self.log.offer(self._failed(request_id, row, request, seconds, error, model))
            return
        answer = answered.result()
        query = answer.query
        self.log.offer(
            {
                "request_id": request_id,
                "row": row,
                "time": round(self._clock() * 1_000_000),
                "user_key": None if request.user_id is None else str(request.user_id),
                "user_id": None if query is None else query.user_id,
                "item_ids": [] if query is None else query.history_ids.tolist(),
                "timestamps": None if query is None or query.times is None else query.times.tolist(),
                "k": request.k,
                "control": _control_of(request, answer),
                "recommended": [item.item_id for item in answer.items],
                "scores": [item.score for item in answer.items],
                "source": answer.source,
                "degraded": list(answer.degraded),
                "target": self._target,
                "run": answer.model.run,
                "step": answer.model.step,
                "version": answer.model.version,
                "latency_ms": 1000 * seconds,
                "model": self._model_name,
                "error": None,
                **(dict.fromkeys(DECIDED) if decided is None else decided),
            }
        )

    def _failed(
        self,
        request_id: str,
        row: int,
        request: RecommendRequest,
        seconds: float,
        error: BaseException,
        model: ModelInfo,
    ) -> dict[str, object]:
        """A row without an answer, and without a history, so that nobody takes it for one of training."""
        known: dict[str, object] = {
            "request_id": request_id,
            "row": row,
            "time": round(self._clock() * 1_000_000),
            "user_key": None if request.user_id is None else str(request.user_id),
            "item_ids": [],
            "k": request.k,
            "recommended": [],
            "scores": [],
            "degraded": [],
            "target": self._target,
            "run": model.run,
            "step": model.step,
            "version": model.version,
            "latency_ms": 1000 * seconds,
            "model": self._model_name,
            "error": f"{type(error).__name__}: {error}"[:MAX_ERROR],
        }
        return {name: known.get(name) for name in SCHEMA.names}

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return log_metrics("request_log", self.log)

    def close(self) -> None:
        self.log.close()


def _control_of(request: RecommendRequest, answer: RecommendAnswer) -> str | None:
    """What the list had to be besides good, and whether it is; as it was asked for and answered."""
    if answer.control is None:
        return None
    asked = request.model_dump(include={"candidates", "quotas", "diversity"}, exclude_defaults=True)
    return json.dumps(asked | {"answer": answer.control.model_dump()})

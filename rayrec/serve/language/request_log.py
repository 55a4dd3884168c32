"""What was asked of language models and answered, for a share of the requests, in Parquet files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from rayrec.serve.events.intake import log_metrics
from rayrec.serve.events.parquet_log import ParquetLog
from rayrec.serve.events.request_log import is_of_share
from rayrec.serve.language.config import ChatLogConfig
from rayrec.serve.language.outcomes import Outcome, of_characters
from rayrec.serve.language.served import Kind

SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("time", pa.timestamp("us")),  # of its end
        ("kind", pa.string()),  # chat, text, embedding
        ("name", pa.string()),  # that was asked for
        ("model", pa.string()),  # that answered
        ("is_shadow", pa.bool_()),  # its answer was shown to nobody
        ("user_key", pa.string()),
        ("is_stream", pa.bool_()),
        ("status", pa.int64()),  # 200; 499: the caller went away
        ("error", pa.string()),  # a sentence, or its code unless texts are taken down: it may quote them
        ("finish_reasons", pa.list_(pa.string())),
        ("prompt_tokens", pa.int64()),
        ("answer_tokens", pa.int64()),
        ("first_ms", pa.float64()),  # to the first chunk
        ("latency_ms", pa.float64()),
        ("request", pa.string()),  # JSON; null unless texts are taken down
        ("answers", pa.list_(pa.string())),
    ]
)


class ChatLog:
    """Never refuses: what finds no room is counted."""

    def __init__(self, config: ChatLogConfig, clock: Callable[[], float] = time.time) -> None:
        self._config, self._clock = config, clock
        self.log = ParquetLog(config.folder, SCHEMA, config.roll_s, config.roll_rows, config.max_queued)

    def wants(self, request_id: str) -> bool:
        """Whether the request is of the share."""
        return is_of_share(request_id, self._config.share)

    def answered(
        self,
        request_id: str,
        kind: Kind,
        body: Mapping[str, Any],
        model: str,
        user: str | None,
        is_shadow: bool,
        outcome: Outcome,
    ) -> None:
        """Take down what became of a request."""
        texts = self._config.texts
        # One that cannot be written would not be taken down, and callers and other services say anything.
        row = of_characters(
            {
                "request_id": request_id,
                "time": round(self._clock() * 1_000_000),
                "kind": kind,
                "name": str(body.get("model")),
                "model": model,
                "is_shadow": is_shadow,
                "user_key": user,
                "is_stream": bool(body.get("stream")) and not is_shadow,
                "status": outcome.status,
                "error": outcome.error if texts else outcome.code,
                "finish_reasons": [outcome.reasons[index] for index in sorted(outcome.reasons)],
                "prompt_tokens": outcome.prompt_tokens,
                "answer_tokens": outcome.answer_tokens,
                "first_ms": None if outcome.first_s is None else 1000 * outcome.first_s,
                "latency_ms": 1000 * outcome.seconds,
                "request": json.dumps(body, ensure_ascii=False) if texts else None,
                "answers": outcome.answers if texts and kind != "embedding" else None,
            }
        )
        self.log.offer(row)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return log_metrics("request_log", self.log)

    def close(self) -> None:
        self.log.close()

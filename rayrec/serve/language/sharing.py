"""Names that several models answer to: who is answered by which, and which one is only compared.

    request ─► user ─► Router ─► model ─► answer ─► caller
                         └ of a share, a copy ─► shadow ─► its answer, compared with the caller's

Router and shadow are those of recommendations (`rayrec.serve.routing`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayrec.serve.language.config import SharedNameConfig
from rayrec.serve.language.outcomes import Outcome
from rayrec.serve.language.request_log import ChatLog
from rayrec.serve.language.served import Kind, ServedModel
from rayrec.serve.routing.shadow import Shadow
from rayrec.serve.routing.targets import Router


@dataclass(frozen=True)
class Copied:
    """What a shadow is asked, and where the answer to compare with will be."""

    request_id: str
    kind: Kind
    body: Mapping[str, Any]
    user: str | None
    shown: asyncio.Future[Outcome]


class SharedName:
    """One name; on one event loop."""

    def __init__(
        self, config: SharedNameConfig, models: Mapping[str, ServedModel], log: ChatLog | None
    ) -> None:
        self.config = config
        self._router = Router(config.routing)
        self._log = log
        self.num_sent: Counter[str] = Counter()
        """Requests by model."""
        self.num_same = self.num_different = 0
        """Answers of the shadow that were those of the model that was shown, and that were others."""
        self._shadow: Shadow[Copied] | None = None
        if config.shadow is not None:
            self._shadow_model = models[config.shadow.target]
            self._timeout_s = config.shadow.timeout_s
            self._shadow = Shadow(self._ask_shadow, config.shadow)

    def model_of(self, user: str | None, caller: str) -> str:
        """Name of the model that answers."""
        name = self._router.target_of(user, caller)
        self.num_sent[name] += 1
        return name

    def copy(
        self, request_id: str, kind: Kind, body: Mapping[str, Any], user: str | None, outcome: Outcome
    ) -> None:
        """Offer a request to the shadow, to be compared with what becomes of it."""
        if self._shadow is None:
            return
        shown: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        outcome.on_end.append(lambda ended: None if shown.done() else shown.set_result(ended))
        self._shadow.offer(Copied(request_id, kind, body, user, shown))

    async def _ask_shadow(self, asked: Copied) -> None:
        outcome = Outcome()
        body = {key: value for key, value in asked.body.items() if key not in ("stream", "stream_options")}
        try:
            call = self._shadow_model.read(asked.kind, body)
            call.check_room()
            outcome.add(await call.whole(time.monotonic() + self._timeout_s))
        except BaseException as error:
            outcome.end(error)
            raise
        else:
            outcome.end(None)
        finally:
            if self._log is not None and self._log.wants(asked.request_id):
                name = self._shadow_model.settings.name
                self._log.answered(asked.request_id, asked.kind, asked.body, name, asked.user, True, outcome)
        # Not waited for: one that is written for longer than a shadow may take is no failure of its.
        asked.shown.add_done_callback(lambda shown: self._compare(asked.kind, shown.result(), outcome))

    def _compare(self, kind: Kind, shown: Outcome, outcome: Outcome) -> None:
        if shown.error is not None or kind == "embedding":
            return
        if shown.answers == outcome.answers:
            self.num_same += 1
        else:
            self.num_different += 1

    def counts(self) -> dict[str, int]:
        """Of the shadow, by what became of its requests; empty where there is none."""
        if self._shadow is None:
            return {}
        counts = self._shadow.counts
        return {
            "sent": counts.sent,
            "answered": counts.answered,
            "failed": counts.failed,
            "dropped": counts.dropped,
            "same": self.num_same,
            "different": self.num_different,
        }

    async def close(self) -> None:
        """Give up what is at the shadow."""
        if self._shadow is not None:
            await self._shadow.close()

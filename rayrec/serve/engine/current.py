"""Which model answers now, where models follow each other while requests come."""

from __future__ import annotations

from typing import Protocol

from rayrec.serve.engine.service import KnownHistory, RecommendationService
from rayrec.serve.wire.item_texts import ItemTexts
from rayrec.serve.wire.schemas import ModelInfo, RankerInfo


class Service(Protocol):
    """What the HTTP side asks, whether the model is always the same or not."""

    max_k: int

    @property
    def pinned(self) -> RecommendationService:
        """The model that a request which comes now is answered by, whatever follows while it waits."""
        ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def ranker(self) -> RankerInfo | None: ...

    @property
    def item_texts(self) -> ItemTexts | None: ...

    def users_like(self, text: str, limit: int) -> list[str]: ...

    def known_history(self, user_key: str, limit: int) -> KnownHistory | None: ...


class CurrentService:
    """A `Service` whose model can be replaced; from any thread.

    The model before stays, so that to go back to it takes no time.
    """

    def __init__(self, service: RecommendationService) -> None:
        self.max_k = service.max_k
        self._now = service
        self._before: RecommendationService | None = None

    def flip(self, service: RecommendationService) -> None:
        """Let another model answer requests that come from now on; those that wait keep theirs."""
        self._now, self._before = service, self._now

    def held(self, version: int) -> RecommendationService | None:
        """The model of this version, if it is one of the two that are held."""
        for service in (self._now, self._before):
            if service is not None and service.model.version == version:
                return service
        return None

    @property
    def pinned(self) -> RecommendationService:
        return self._now

    @property
    def model(self) -> ModelInfo:
        return self._now.model

    @property
    def ranker(self) -> RankerInfo | None:
        return self._now.ranker

    @property
    def item_texts(self) -> ItemTexts | None:
        return self._now.item_texts

    def users_like(self, text: str, limit: int) -> list[str]:
        return self._now.users_like(text, limit)

    def known_history(self, user_key: str, limit: int) -> KnownHistory | None:
        return self._now.known_history(user_key, limit)

"""Which model answers now, where models follow each other while requests come."""

from __future__ import annotations

from typing import Protocol

from rayrec.serve.engine.canary import RunningCanary
from rayrec.serve.engine.draws import Note
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

    def drawn_for(self, user: str | int | None) -> tuple[RecommendationService, Note | None]:
        """The same for a user: of a canary, where there is one and the user is of its share.

        Returns:
            The model, and what to call when it has answered; None: nothing is compared.
        """
        ...

    def version(self, label: str) -> RecommendationService | None:
        """One that answers somebody now, by the label of its version."""
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
        self._canary: RunningCanary | None = None
        self._last_canary: RecommendationService | None = None
        """Until it is known whether it is the next one to answer."""

    def flip(self, service: RecommendationService) -> None:
        """Let another model answer requests that come from now on; those that wait keep theirs."""
        self._now, self._before, self._last_canary = service, self._now, None

    def share_with(self, canary: RunningCanary | None) -> None:
        """Let a canary answer its share of the users from now on; None: there is none. Its model stays until
        another one follows, or another canary begins."""
        ended, self._canary = self._canary, canary
        self._last_canary = ended.service if ended is not None and canary is None else None

    def held(self, version: int) -> RecommendationService | None:
        """The model of this version, if it is one of those that are held."""
        running = None if self._canary is None else self._canary.service
        for service in (self._now, self._before, running, self._last_canary):
            if service is not None and service.model.version == version:
                return service
        return None

    @property
    def pinned(self) -> RecommendationService:
        return self._now

    def drawn_for(self, user: str | int | None) -> tuple[RecommendationService, Note | None]:
        canary, now = self._canary, self._now
        if canary is None or now.model.version != canary.canary.baseline:  # it serves, or is about to end
            return now, None
        draw = canary.draw(user)
        return canary.service if draw.is_canarys else now, draw.note

    def version(self, label: str) -> RecommendationService | None:
        canary = self._canary
        for service in (self._now, *(() if canary is None else (canary.service,))):
            if service.model.label == label:
                return service
        return None

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

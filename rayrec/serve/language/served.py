"""What a model is to the routes, whichever engine answers for it.

    route ─► ServedModel.read ─► Call ─► limits ─► Call.whole, or Call.stream ─► answer, or events

Requests and answers are objects of JSON, as OpenAI's API has them: what an engine does with tokens, or who
it asks, is its own business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal, Protocol

from rayrec.serve.language.config import ModelLimits
from rayrec.serve.language.measures import EngineMeasures

Kind = Literal["chat", "text", "embedding"]
"""Of a request: chat completions, completions, embeddings."""
Values = AsyncGenerator[dict[str, Any], None]


class Call(Protocol):
    """A request to one model, read and found to be one; nothing has been made of it."""

    @property
    def count(self) -> int:
        """Answers that it asks for, as limits count them."""

    @property
    def is_stream(self) -> bool: ...

    @property
    def user(self) -> str | None:
        """Whom it says it is for."""

    def check_room(self) -> None:
        """Check that the answers could be begun, or wait.

        Raises:
            ServiceLimitError: too many wait.
            RequestError: the engine has stopped (503), or so many are never taken.
        """

    async def whole(self, expires_at: float) -> dict[str, Any]:
        """The answer, in the form of its route.

        Args:
            expires_at: by `time.monotonic`; it is of no use later.

        Raises:
            RequestError: it cannot be answered, or not by this engine.
            RefusedError: there is no room.
            DeadlineError: it was not answered in time.
        """

    async def stream(self, expires_at: float) -> Values:
        """The chunks of an answer, in the form of its route, as they come.

        Returns when it is known that there will be some: what fails before has a status of its own. Closing
        what is returned ends the answer, wherever it is computed.
        """


class ServedModel(Protocol):
    """A model, and the engine that answers for it; on one event loop."""

    is_here: bool
    """Whether it fails with this process, and this process with it."""

    @property
    def settings(self) -> ModelLimits:
        """Its name and limits."""

    @property
    def measures(self) -> EngineMeasures: ...

    def read(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        """What a request asks for.

        Raises:
            RequestError: it is none that this model could answer.
        """

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """End all that was started; answers that are being written end with an error."""

    async def why_not(self) -> str | None:
        """Why it does not answer now, in a sentence; None: it does."""

"""Which of several targets answers a request; a service has several with `--services` only.

By user, the target is the one of the highest score -w / ln(u), where w is its weight and u, between 0 and 1,
a hash of experiment, target and user: highest random weight hashing. Shares are in proportion to weights. A
target whose weight changes takes users from the others, or gives them some, and none moves between these: as
many move as the shares say. Where several weights change at once, and with them δ of the shares, at most
2δ / (1 + δ) of the users move, and no rule that does not know the weights of before does better.

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on
Networking 6 (1998); the bound and that it is optimal, Bavarian et al., arXiv:1612.01041.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

import numpy as np
import xxhash

from rayrec.platform.hashing import combine64
from rayrec.serve.config.services import RoutingConfig

Request = TypeVar("Request")
Answer = TypeVar("Answer")

Send = Callable[[Request], Awaitable[Answer]]
"""Asks a target, wherever it runs."""


TARGET = "X-Target"
"""Header of an answer: which target it is of."""


class Router:
    """Chooses targets. Not thread-safe."""

    def __init__(self, config: RoutingConfig) -> None:
        weights = {name: weight for name, weight in config.weights.items() if weight > 0}
        self._by_user = config.by == "user"
        self._names = list(weights)
        self._weights = np.array(list(weights.values()))
        self._shares = self._weights / self._weights.sum()
        experiment = _hash_of(config.experiment)
        names = np.array([_hash_of(name) for name in self._names], dtype=np.uint64)
        self._salts = combine64(np.uint64(experiment), names)
        self._generator = np.random.default_rng(config.seed)

    def target_of(self, user: str | int | None, fallback: str | None = None) -> str:
        """Name of the target that answers.

        Args:
            user: 7 and "7" are the same.
            fallback: what a request without a user is known by, such as a session; without it, too, the
                target is drawn.
        """
        key = fallback if user is None else str(user)
        if key is None or not self._by_user:
            return self._names[int(self._generator.choice(len(self._names), p=self._shares))]
        hashes = combine64(self._salts, np.uint64(_hash_of(key)))
        # 53 bits are what a float64 holds; the half keeps 0 and 1 out.
        uniform = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return self._names[int(np.argmax(-self._weights / np.log(uniform)))]


class Routed(Generic[Request, Answer]):
    """Sends each request to the target that answers it."""

    def __init__(
        self,
        router: Router,
        sends: Mapping[str, Send[Request, Answer]],
        key_of: Callable[[Request], tuple[str | int | None, str | None]],
    ) -> None:
        """
        Args:
            sends: of every target that has a weight, by name.
            key_of: user and fallback key of a request.
        """
        self._router, self._sends, self._key_of = router, sends, key_of
        self.num_sent = dict.fromkeys(sends, 0)
        """Requests by target."""

    async def __call__(self, request: Request) -> Answer:
        """The answer, or the error, of the request's target."""
        target = self._router.target_of(*self._key_of(request))
        self.num_sent[target] += 1
        return await self._sends[target](request)


def _hash_of(text: str) -> int:
    # A user may be named by any text of JSON, half a character among them.
    return xxhash.xxh3_64_intdigest(text.encode(errors="replace"))

"""What may come next, token by token.

One protocol for all constraints of what a model says: a schema or a regular expression (`text_grammar`),
items by their codes, alone or within a text (`item_grammar`). A sampler asks a grammar three things at each
step:

    allowed_V        which tokens may come next
    fits(token, n)   whether the text can still be ended by n tokens behind this one
    ending           the tokens of a way to end it that is known to be allowed

With the second and the third, what is said is complete however few tokens there are: see `sampler`.

Axes: V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rayrec.platform.arrays import BoolArray


class TokenGrammar(Protocol):
    """The state of one sequence; not thread-safe."""

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""

    @property
    def is_over(self) -> bool:
        """Whether it may only end here."""

    @property
    def ending(self) -> Sequence[int]:
        """Tokens that may come next and complete the text; none where it is complete."""

    def allowed_V(self) -> BoolArray:
        """[V]; without tokens that end texts."""

    def fits(self, token: int, left: int) -> bool:
        """Whether there is an ending of at most `left` tokens behind an allowed token."""

    def advance(self, token: int) -> None:
        """The token has been chosen.

        Raises:
            ValueError: it is not allowed.
        """

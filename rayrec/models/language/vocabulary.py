"""What a language model has to know of its tokenizer. Imports no torch, for feature workers read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """Numbers of tokens: those of the base, and behind them those that were added, such as codes of items."""

    num_tokens: int
    """With those that only fill up to a multiple, which nobody predicts."""
    first_new: int
    """The first that the base does not have; `num_tokens` where there are none."""
    pad: int
    ends: tuple[int, ...]
    """Those behind which nothing is generated."""

    @property
    def new_tokens(self) -> range:
        return range(self.first_new, self.num_tokens)

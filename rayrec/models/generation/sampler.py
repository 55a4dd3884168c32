"""Which token comes next: by the logits of a model, how they are to be sampled, and a grammar.

With a grammar, a token is chosen only if the text can still be ended by the tokens that are left behind it. A
token that would not fit is taken out, and another one chosen of the rest: that is sampling from the
distribution of those that fit. After `MOST_TRIES` of them the known ending is begun. Whatever the model
prefers, and however few tokens there are (if they are enough for the shortest text), what is said is
complete.

Sampling is keyed by a seed: equal requests with equal seeds give equal answers, whatever else is computed
beside them.

Axes: V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayrec.models.generation.token_grammar import TokenGrammar

MOST_TRIES = 24
"""Tokens that are tried for one position before the ending is begun."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled."""

    temperature: float = 1.0
    """0: the most probable token."""
    top_p: float = 1.0
    """The most probable tokens that together have this probability; the first one always."""
    top_k: int = 0
    """The most probable ones; 0: all."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Taken off the logit of what was said: once, and for each time."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    index: int = 0
    """Of several answers to one request."""
    num_top: int | None = None
    """Most probable tokens whose log-probabilities are told; None: not even that of the chosen one."""


class Chosen(NamedTuple):
    """A token, and its log-probability by the model alone, whatever a grammar or the temperature made of
    it."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class TokenSampler:
    """Chooses the tokens of one sequence; not thread-safe."""

    def __init__(self, sampling: Sampling, ends: Sequence[int], grammar: TokenGrammar | None = None) -> None:
        """
        Args:
            ends: tokens that end a text; with a grammar, they come only where it is complete.
        """
        self._sampling, self._ends, self.grammar = sampling, list(ends), grammar
        key = [sampling.seed & (2**64 - 1), sampling.index]
        self._random = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
        self._said: Counter[int] = Counter()

    def choose(self, logits_V: NDArray[np.float32], left: int) -> Chosen:
        """The next token; the grammar has advanced to behind it.

        Args:
            left: tokens that may be said, this one included; at least 1.
        """
        scores_V = self._biased(logits_V)
        token = self._draw(scores_V) if self.grammar is None else self._constrained(scores_V, left)
        self._said[token] += 1
        return self._told(token, logits_V)

    def _constrained(self, scores_V: NDArray[np.float32], left: int) -> int:
        grammar = self.grammar
        assert grammar is not None
        allowed_V = grammar.allowed_V().copy()
        allowed_V[self._ends] = grammar.is_complete
        masked_V = np.where(allowed_V, scores_V, -np.inf)
        token: int | None = None
        for _ in range(MOST_TRIES):
            if not np.isfinite(masked_V).any():
                break
            tried = self._draw(masked_V)
            if tried in self._ends or grammar.fits(tried, left - 1):
                token = tried
                break
            masked_V[tried] = -np.inf
        if token is None:
            token = grammar.ending[0] if grammar.ending else self._ends[0]
        if token not in self._ends:
            grammar.advance(token)
        return token

    def _biased(self, logits_V: NDArray[np.float32]) -> NDArray[np.float32]:
        sampling = self._sampling
        penalized = bool(self._said) and bool(sampling.presence_penalty or sampling.frequency_penalty)
        if not penalized and not sampling.logit_bias:
            return logits_V
        scores_V = logits_V.copy()
        for token, value in sampling.logit_bias.items():
            scores_V[token] += value
        if penalized:
            for token, count in self._said.items():
                scores_V[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
        return scores_V

    def _draw(self, scores_V: NDArray[np.float32]) -> int:
        """A token by its score; -inf never comes."""
        sampling = self._sampling
        if sampling.temperature == 0:
            return int(scores_V.argmax())
        kept, weights = self._kept(scores_V)
        sums = np.cumsum(weights)
        at = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(kept[min(at, len(kept) - 1)])

    def _kept(self, scores_V: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """(tokens that may be drawn, their weights)."""
        sampling = self._sampling
        kept = np.flatnonzero(np.isfinite(scores_V))
        scores = scores_V[kept].astype(np.float64)
        if 0 < sampling.top_k < len(kept):
            best = np.argpartition(-scores, sampling.top_k - 1)[: sampling.top_k]
            best.sort()
            kept, scores = kept[best], scores[best]
        weights = np.exp((scores - scores.max()) / sampling.temperature)
        if sampling.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            sums = np.cumsum(weights[order])
            count = int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1
            best = np.sort(order[:count])
            kept, weights = kept[best], weights[best]
        return kept, weights

    def _told(self, token: int, logits_V: NDArray[np.float32]) -> Chosen:
        count = self._sampling.num_top
        if count is None:
            return Chosen(token, None, ())
        highest = float(logits_V.max())
        total = highest + float(np.log(np.exp(logits_V - highest, dtype=np.float64).sum()))
        top: tuple[tuple[int, float], ...] = ()
        if count:
            best = np.argpartition(-logits_V, count - 1)[:count]
            best = best[np.argsort(-logits_V[best], kind="stable")]
            top = tuple((int(each), float(logits_V[each]) - total) for each in best)
        return Chosen(token, float(logits_V[token]) - total, top)

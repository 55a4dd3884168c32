"""Greedy answers that are held to a form, in the loop of transformers.

Axes: B rows, T tokens so far, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayrec.models.generation.forms import Begin, CopyForm, RegexForm, SchemaForm, grammars_of
from rayrec.models.generation.sampler import Sampling, TokenSampler
from rayrec.models.generation.token_grammar import TokenGrammar
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.platform.errors import InputError


@dataclass(frozen=True)
class HeldForm:
    """A form, and the tokenizer of what is held to it. Travels between processes."""

    form: CopyForm | SchemaForm | RegexForm
    tokenizer: str
    """Folder."""

    def begin(self, vocabulary: Vocabulary) -> Begin:
        """What begins a grammar for each answer; takes up to seconds.

        Raises:
            InputError: a package is missing, or the form cannot be held with this tokenizer.
        """
        try:
            return grammars_of(self.form, self.tokenizer, vocabulary.ends, vocabulary.num_tokens)
        except InputError as error:
            raise InputError(f"evaluation.form: {error}") from error


def check_shortest(grammar: TokenGrammar, most: int) -> None:
    """Check that an answer fits that has not begun.

    Raises:
        InputError: the shortest one has more tokens.
    """
    if (shortest := len(grammar.ending)) > most:
        raise InputError(
            f"the shortest answer of evaluation.form has {shortest} tokens, and {most} may be written; "
            "raise evaluation.max_new_tokens, and model.max_length with it"
        )


class HeldAnswers:
    """Chooses the next token of each row; a `LogitsProcessor` that leaves nothing else to choose."""

    def __init__(self, grammars: Sequence[TokenGrammar], ends: Sequence[int], most: int) -> None:
        """
        Args:
            most: tokens of an answer.

        Raises:
            InputError: the shortest answer of a row has more.
        """
        for grammar in grammars:
            check_shortest(grammar, most)
        self._ends, self._left = list(ends), most
        self._samplers = [TokenSampler(Sampling(temperature=0.0), ends, grammar) for grammar in grammars]
        self._is_over_B = [False] * len(grammars)

    def __call__(self, tokens_BT: Tensor, scores_BV: Tensor) -> Tensor:
        logits_BV = scores_BV.float().cpu().numpy()
        held_BV = np.full_like(logits_BV, -np.inf)
        for row, sampler in enumerate(self._samplers):
            token = self._ends[0]
            if not self._is_over_B[row]:
                token = sampler.choose(logits_BV[row], self._left).token
                self._is_over_B[row] = token in self._ends
            held_BV[row, token] = 0.0
        self._left -= 1
        return torch.from_numpy(held_BV).to(scores_BV)

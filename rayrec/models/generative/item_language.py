"""A language model that reads words and semantic IDs together, and recommends items.

    words, codes of items, rows of tables, as tokens ──► layers ──► the codes of an item, by the trie
                                                            └─────► words, where an answer is a text

What is read is a prompt (`rayrec.samples.text.prompts`). A token that is to be predicted is a code or a word:
of words, the softmax runs over all tokens there are; of codes, over those of their level or those that lead
to an item, as in every other generative model. What the network does not learn is when to say a code and when
a word: where an answer is an item, it is asked for one.

Axes: as in `language_backbone`; K tokens that are predicted.

Source: Singh et al. (PLUM), arXiv:2510.07784, for the mixture of tasks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.generative.code_softmax import ALL_CODES, CodeSoftmax
from rayrec.models.generative.language_backbone import KeyValueContext, LanguageBackbone
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.language.attention import PackedRows
from rayrec.models.language.language_model import LanguageModel, targets_of
from rayrec.models.language.text_tensors import TextTensors
from rayrec.models.sequence.tensor_batch import TensorBatch


class ItemLanguageBackbone(LanguageBackbone):
    """Prompts to codes."""

    def __init__(
        self,
        language: LanguageModel,
        level_sizes: tuple[int, ...],
        first_token: int,
        choice: Choice = AUTO,
        code_softmax: CodeSoftmax = ALL_CODES,
    ) -> None:
        """
        Args:
            language: on packed rows, with a row for each token of the tokenizer.
            first_token: as of `LanguageBackbone`.
        """
        super().__init__(level_sizes, first_token, choice)
        self.language = language
        self.code_softmax = code_softmax

    @property
    def network(self) -> Any:
        return self.language.network

    @property
    def frozen_weights(self) -> dict[str, Tensor]:
        return {f"language.{name}": weight for name, weight in self.language.frozen_weights.items()}

    def loss(self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None) -> Tensor:
        raise AssertionError("of a prompt, tokens are predicted: prompt_loss")

    def prompt_loss(self, prompts: TextTensors) -> Tensor:
        """Scalar: cross-entropy summed over the tokens that are to be predicted."""
        before_K, targets_K = targets_of(prompts)
        hidden_KD = self.language.hidden(prompts)[before_K]
        num_levels, first = len(self.level_sizes), self._first_tokens[0]
        is_code_K = (targets_K >= first) & (targets_K < first + sum(self.level_sizes))
        (places_C,), (places_W,) = (chosen_K.nonzero(as_tuple=True) for chosen_K in (is_code_K, ~is_code_K))
        # Prompts have items as a whole or not at all, and so the codes of each follow one another.
        hidden_NLD = hidden_KD[places_C].unflatten(0, (-1, num_levels))
        tokens_NL = targets_K[places_C].unflatten(0, (-1, num_levels))
        codes_NL = tokens_NL - tokens_NL.new_tensor(self._first_tokens)
        logits = (self._logits(hidden_NLD[:, level], level) for level in range(num_levels))
        total = self.code_softmax.losses(logits, codes_NL).sum()
        if len(places_W):
            total = total + self.language.token_loss(hidden_KD[places_W], targets_K[places_W])
        return total

    def encode_context(self, batch: TensorBatch) -> KeyValueContext:
        prompts = batch.prompts
        assert prompts is not None, "rows of this model are prompts"
        rows = PackedRows(prompts.layout, self.choice, keep=True)
        hidden_MD = self.language.hidden(prompts, rows)
        return self._context(prompts.layout, rows, prompts.layout.last(hidden_MD))


class ItemLanguageRecommender(GenerativeRecommender):
    """Learns tokens of prompts; recommends as others do."""

    backbone: ItemLanguageBackbone

    @property
    def frozen_weights(self) -> dict[str, Tensor]:
        return {f"backbone.{name}": weight for name, weight in self.backbone.frozen_weights.items()}

    def loss(self, batch: TensorBatch) -> Tensor:
        assert batch.prompts is not None, "rows of this model are prompts"
        return self.backbone.prompt_loss(batch.prompts)

"""What backbones have in common that are a causal language model of the package `transformers`.

What is read before an item is a row of tokens, of whatever kind; its keys and values are computed and held
once. The codes of the item that follows are scored one level after the other, each by its own slice of the
output matrix: a position's softmax runs over the codes of the level that comes next, never over other levels
or words. Beams have a small cache of their own codes (see `rayrec.models.language.attention`).

The dropout of `transformers` is off: it draws from the global random generator, and the same seed would no
longer give the same numbers for every split of a batch over trainers. There is keyed dropout instead
(`rayrec.models.language.layer_dropout`).

Axes: as in `backbone`; T tokens of the longest row, G key heads, C channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.choice import Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.backbone import GenerativeBackbone
from rayrec.models.language.adapters import output_weight
from rayrec.models.language.attention import Attending, Continuations, PackedRows
from rayrec.models.program.sharding import whole


@dataclass(frozen=True)
class KeyValueContext:
    """What a network's layers keep of each row's history."""

    keys: dict[int, Tensor]
    """By layer [B, G, T, C]."""
    values: dict[int, Tensor]
    bias_B1T: Tensor
    """-inf after the end of a row, else 0."""
    lengths_B: Tensor
    """Tokens of each row."""
    last_BD: Tensor
    """What the network's last layer says at the end of each row; without meaning for a row without tokens."""

    def __len__(self) -> int:
        return len(self.lengths_B)

    def some_rows(self, rows: slice) -> KeyValueContext:
        return KeyValueContext(
            {layer: keys[rows] for layer, keys in self.keys.items()},
            {layer: values[rows] for layer, values in self.values.items()},
            self.bias_B1T[rows],
            self.lengths_B[rows],
            self.last_BD[rows],
        )


class LanguageBackbone(GenerativeBackbone[KeyValueContext]):
    """Scores codes behind rows of tokens."""

    network: Any
    """Of `rayrec.models.language.networks`, with our attention."""

    def __init__(self, level_sizes: tuple[int, ...], first_token: int, choice: Choice) -> None:
        """
        Args:
            first_token: the vocabulary's number of code 0 of the first level; those of all levels follow.
            choice: who computes the attention of what is read.
        """
        super().__init__()
        self.choice = choice
        self.level_sizes = level_sizes
        self._first_tokens = tuple(
            first_token + sum(level_sizes[:level]) for level in range(len(level_sizes))
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self._embeddings(tokens)
        return vectors

    @property
    def _embeddings(self) -> Any:
        return self.network.get_input_embeddings()

    def _context(self, tokens: JaggedLayout, rows: PackedRows, last_BD: Tensor) -> KeyValueContext:
        lengths_B = tokens.lengths_on_device_B()
        ended_BT = torch.arange(rows.num_tokens, device=lengths_B.device) >= lengths_B[:, None]
        bias_B1T = last_BD.new_zeros(1).expand_as(ended_BT).masked_fill(ended_BT, -torch.inf)[:, None]
        return KeyValueContext(rows.keys, rows.values, bias_B1T, lengths_B, last_BD)

    def step(self, context: KeyValueContext, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        if depth == 0:
            return self._logits(context.last_BD[:, None], 0)
        tokens_BW = codes_BWd[:, :, -1] + self._first_tokens[depth - 1]
        positions_BW = (context.lengths_B[:, None] + (depth - 1)).expand_as(tokens_BW)
        beams = Continuations(
            context.keys, context.values, context.bias_B1T, codes_BWd.shape[1], depth, cache
        )
        return self._logits(self._hidden(self._embed(tokens_BW), positions_BW, beams), depth)

    def sequence_logits(self, context: KeyValueContext, codes_BWL: Tensor) -> list[Tensor]:
        num_rows, num_sequences, num_levels = codes_BWL.shape
        logits = [self._logits(context.last_BD[:, None].expand(-1, num_sequences, -1), 0)]
        num_given = num_levels - 1  # the last code conditions nothing
        if not num_given:
            return logits
        levels_G = torch.arange(num_given, device=codes_BWL.device)
        tokens_BWG = codes_BWL[:, :, :-1] + codes_BWL.new_tensor(self._first_tokens[:-1])
        positions_BWG = (context.lengths_B[:, None, None] + levels_G).expand_as(tokens_BWG)
        sequences = Continuations(
            context.keys, context.values, context.bias_B1T, num_sequences, num_given, cache=None
        )
        hidden = self._hidden(self._embed(tokens_BWG.flatten(1)), positions_BWG.flatten(1), sequences)
        hidden_BWGD = hidden.view(num_rows, num_sequences, num_given, -1)
        return logits + [self._logits(hidden_BWGD[:, :, level - 1], level) for level in range(1, num_levels)]

    def _hidden(self, vectors: Tensor, positions: Tensor, attending: Attending) -> Tensor:
        """[batch, tokens, D] what the network's last layer says at every token, of the tokens' vectors."""
        hidden: Tensor = self.network.base_model(
            inputs_embeds=vectors, position_ids=positions, use_cache=False, attending=attending
        ).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor, level: int) -> Tensor:
        """[..., D] to [..., K] of the codes of a level."""
        head = self.network.get_output_embeddings()
        codes = slice(self._first_tokens[level], self._first_tokens[level] + self.level_sizes[level])
        # Heads of adapters have no `bias`. Those of split networks are DTensors, which do not mix with plain
        # tensors.
        bias = getattr(head, "bias", None)
        weight_KD = whole(output_weight(head))[codes]
        return functional.linear(hidden, weight_KD, None if bias is None else whole(bias)[codes])

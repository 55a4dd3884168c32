"""A causal language model on rows of tokens, some of which stand for rows of embedding tables.

    tokens ──► vectors of the network's matrix ──┐
    rows of tables ──► projection of the table ──┴─► layers ─► matrix of outputs ─► loss of the targets alone

Rows are packed: they stand one after the other without padding, and attend within themselves. Networks that
our attention does not fit read padded rows by the attention of `transformers`; then the loss goes through the
network's own logits.

Axes: as in `text_tensors`; K targets, V tokens of the vocabulary, T tokens of the longest row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.linear_cross_entropy import linear_cross_entropy
from rayrec.models.language.adapters import frozen_parameters, output_weight
from rayrec.models.language.attention import PackedRows
from rayrec.models.language.held_answers import HeldAnswers
from rayrec.models.language.layer_dropout import add_dropout
from rayrec.models.language.networks import padded_attention
from rayrec.models.language.text_tensors import TextTensors
from rayrec.models.program.sharding import whole

LOGITS_AT_ONCE = 1 << 22
"""Of targets that are judged, whose gradients nobody asks for."""


class LanguageModel(nn.Module):
    """Tokens to tokens."""

    def __init__(
        self,
        network: nn.Module,
        table_dims: Mapping[str, int] | None = None,
        packed: bool = True,
        choice: Choice = AUTO,
        dropout: float = 0.0,
    ) -> None:
        """
        Args:
            network: of `rayrec.models.language.networks`.
            table_dims: width of the rows of tables that tokens may stand for; their projections begin with
                weights from torch's default generator.
            packed: see `networks.Wanted`.
            choice: who computes the attention of packed rows.
            dropout: probability, of vectors of tokens and of what layers add to them, in training on packed
                rows.

        Raises:
            InputError: layers of the network on which dropout would fall are not found.
        """
        super().__init__()
        self.network: Any = network
        self.packed = packed
        self.choice = choice
        width = network.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        self.projections = nn.ModuleDict(
            {table: nn.Linear(dim, width) for table, dim in sorted((table_dims or {}).items())}
        )
        self.input_dropout = add_dropout(network, dropout, "model.dropout")

    @property
    def frozen_weights(self) -> dict[str, Tensor]:
        """The frozen weights by name, which a snapshot does not have."""
        return {f"network.{name}": weight for name, weight in frozen_parameters(self.network).items()}

    @property
    def _num_tokens(self) -> int:
        """V; of a split network, too."""
        return int(self.network.get_output_embeddings().weight.shape[0])

    def loss(self, batch: TextTensors) -> Tensor:
        """Scalar: cross-entropy summed over the targets."""
        before_K, targets_K = targets_of(batch)
        if not self.packed:
            logits_KV = self._padded_logits(batch, before_K)
            return functional.cross_entropy(logits_KV.float(), targets_K, reduction="sum")
        return self.token_loss(self.hidden(batch)[before_K], targets_K)

    def token_loss(self, hidden_KD: Tensor, targets_K: Tensor) -> Tensor:
        """Scalar: cross-entropy summed over tokens, among all that there are.

        Args:
            hidden_KD: what the last layer says before each of them.
        """
        head = self.network.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            return functional.cross_entropy(self._logits(hidden_KD).float(), targets_K, reduction="sum")
        return linear_cross_entropy(hidden_KD, whole(output_weight(head)), targets_K)

    def log_likelihoods(self, batch: TextTensors) -> Tensor:
        """[B] sum over each row's targets of the logarithm of their probability."""
        before_K, targets_K = targets_of(batch)
        if not len(targets_K):  # the layers take no row without tokens
            return torch.zeros(batch.layout.num_rows, device=targets_K.device)
        if self.packed:
            hidden_KD = self.hidden(batch)[before_K]
            parts = [
                self._log_probability(self._logits(hidden_KD[part]), targets_K[part])
                for part in _parts(len(targets_K), self._num_tokens)
            ]
            log_K = torch.cat(parts)
        else:
            log_K = self._log_probability(self._padded_logits(batch, before_K), targets_K)
        sums_B = log_K.new_zeros(batch.layout.num_rows)
        return sums_B.index_add(0, batch.layout.row_N[before_K], log_K)

    def target_log_probs(self, batch: TextTensors) -> Iterator[Tensor]:
        """[P, V] log-probabilities of all tokens in the place of each target, in parts of the K targets."""
        before_K, targets_K = targets_of(batch)
        if not self.packed:
            yield self._padded_logits(batch, before_K).float().log_softmax(1)
            return
        hidden_KD = self.hidden(batch)[before_K]
        for part in _parts(len(targets_K), self._num_tokens):
            yield self._logits(hidden_KD[part]).float().log_softmax(1)

    def generate(
        self,
        batch: TextTensors,
        max_new_tokens: int,
        ends: tuple[int, ...],
        pad: int,
        held: HeldAnswers | None = None,
    ) -> Tensor:
        """[B, up to max_new_tokens] the most probable next token, one after the other, of the package's own
        loop; `pad` behind the first of `ends`.

        Args:
            held: chooses among those that a form allows.
        """
        layout = batch.layout
        vectors_BTD, real_BT = _padded_on_the_left(layout, self.vectors(batch))
        with padded_attention(self.network) if self.packed else contextlib.nullcontext():
            generated: Tensor = self.network.generate(
                inputs_embeds=vectors_BTD,
                attention_mask=real_BT,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=list(ends) or None,
                pad_token_id=pad,
                logits_processor=None if held is None else [held],
                # Split weights are gathered whole before; trainers do not write equally many tokens.
                synced_gpus=False,
            )
        return generated

    def vectors(self, batch: TextTensors) -> Tensor:
        """[N, D] what the layers read of each token."""
        vectors_ND: Tensor = self.network.get_input_embeddings()(batch.tokens_N)
        for table, filled in batch.filled.items():
            projected_PD = self.projections[table](batch.rows[table][filled.inverse_P])
            vectors_ND = vectors_ND.index_copy(0, filled.places_P, projected_PD.to(vectors_ND.dtype))
        return vectors_ND

    def hidden(self, batch: TextTensors, attending: PackedRows | None = None) -> Tensor:
        """[N, D] what the last layer says at each token.

        Args:
            attending: of the batch's layout, of who wants keys and values, and no dropout.
        """
        layout, vectors_ND = batch.layout, self.vectors(batch)
        if attending is None:
            keys_N = batch.keys_N if self.training and self.input_dropout.probability else None
            if keys_N is not None:
                vectors_ND = self.input_dropout(vectors_ND, keys_N)
            attending = PackedRows(layout, self.choice, token_keys_N=keys_N)
        hidden: Tensor = self.network.base_model(
            inputs_embeds=vectors_ND[None],
            position_ids=layout.place_N[None],
            use_cache=False,
            attending=attending,
        ).last_hidden_state
        return hidden[0]

    def _padded_logits(self, batch: TextTensors, at_K: Tensor) -> Tensor:
        """[K, V] by the network's own way through, over rows padded on the right."""
        layout = batch.layout
        real_BT = layout.pad(torch.ones_like(layout.row_N))
        places_T = torch.arange(layout.longest, device=real_BT.device)
        logits_BTV: Tensor = self.network(
            inputs_embeds=layout.pad(self.vectors(batch)),
            attention_mask=real_BT,
            position_ids=places_T.expand(layout.num_rows, -1),
            use_cache=False,
        ).logits
        return logits_BTV[layout.row_N[at_K], layout.place_N[at_K]]

    def _logits(self, hidden_KD: Tensor) -> Tensor:
        head = self.network.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return functional.linear(hidden_KD, whole(output_weight(head)), None if bias is None else whole(bias))

    @staticmethod
    def _log_probability(logits_KV: Tensor, targets_K: Tensor) -> Tensor:
        return -functional.cross_entropy(logits_KV.float(), targets_K, reduction="none")


def targets_of(batch: TextTensors) -> tuple[Tensor, Tensor]:
    """([K] the token before each target, [K] the target)."""
    places_K = batch.is_target_N.nonzero()[:, 0]
    return places_K - 1, batch.tokens_N[places_K]


def _parts(count: int, width: int) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // width)
    return [slice(start, start + size) for start in range(0, count, size)]


def _padded_on_the_left(layout: JaggedLayout, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """([B, T, D], [B, T] 1 where there is a token), rows ending together."""
    shift_N = layout.longest - layout.lengths_on_device_B()[layout.row_N]
    at_N = layout.row_N * layout.longest + layout.place_N + shift_N
    padded = x_ND.new_zeros(layout.num_rows * layout.longest, x_ND.shape[1]).index_copy(0, at_N, x_ND)
    real = torch.zeros(len(padded), dtype=torch.long, device=x_ND.device).index_fill(0, at_N, 1)
    return padded.view(layout.num_rows, layout.longest, -1), real.view(layout.num_rows, -1)

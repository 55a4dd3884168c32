"""A mixture of feed-forward experts: each token goes through the few that its gate chooses.

    token ─► gate: softmax over the experts ─► the k most probable ─► their outputs, times these probabilities

Experts that a token does not choose are not computed for it. In training an accelerator is waited for once in
a layer, to know how many tokens each has. Without gradients, as in decoding, it is not: its tokens stand in
blocks of one expert each, of which there are never more than is known beforehand (MegaBlocks); and for few
tokens all experts are computed, which is less to do. Probabilities are not normalized again over the chosen
ones: with one expert per token its factor would be 1 and teach the gate nothing (Switch).

**Balance.** The loss is Switch's, E Σ_e f_e P_e with f the share of choices and P the mean probability that
an expert got, but over the tokens of one row instead of the batch, as in DeepSeek-V3's sequence-wise term. A
product of means over a batch would not add up over its parts; means over a row do, since rows are never cut:
however many micro-batches and trainers there are, the sum of these losses is the same. It needs rows of many
tokens, as the lazy decoder's are, where every event is a target: with the four to six tokens of one target
it would punish experts that are good at some items, however evenly these come. So the encoder-decoder, whose
rows are one target each, has none (its settings refuse it); an expert may die there. A balance by biases
without a loss (DeepSeek-V3) fits worse here: it is state beside weights and optimizer that every trainer
would have to hear the others' counts for, and that snapshots do not have.

Sources: Fedus et al., "Switch Transformers", JMLR 2022, arXiv:2101.03961; DeepSeek-AI, arXiv:2412.19437; Gale
et al., "MegaBlocks", MLSys 2023, arXiv:2211.15841.

Axes: N tokens (S sequences of Q each), M = N * K choices, P tokens of one expert, E experts, K experts of a
token, D width, F hidden width of an expert; G blocks of T tokens, X slots of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.tensor_plan import Joined, Part
from rayrec.platform.devices import values_may_decide, without_autocast

MOST_DENSE = 1024
"""Tokens without gradients for which every expert is computed."""
BLOCK = 128
"""Tokens of a block: more would be more padding, and the fewer there are, the more often an expert's weights
are read."""
MAX_WEIGHTS = 1 << 24
"""Numbers of one matrix of the experts of all blocks that are computed at once: 64 MiB of float32."""


@dataclass(frozen=True)
class ExpertSettings:
    """How many there are, and what of them is used."""

    count: int
    per_token: int
    balance_weight: float
    """Factor of the balance loss."""


class Gates(NamedTuple):
    """What each token made of the experts."""

    probs_NE: Tensor
    """float32; rows sum to one."""
    is_chosen_NE: Tensor
    best_NK: Tensor
    """The chosen ones, the most probable first."""


class Experts(nn.Module):
    """[N, D] to [N, D], each token through K of E feed-forward networks."""

    part = Part({"up_EFD": 1, "up_bias_EF": 1, "down_EDF": 2}, once=("down_bias_ED",), joined=Joined.SUM)
    """Of several ranks: each has some of the inner width of every expert, and all gates."""

    def __init__(self, dim: int, feedforward_dim: int, settings: ExpertSettings) -> None:
        super().__init__()
        count = settings.count
        self.per_token = settings.per_token
        self.gate_ED = nn.Parameter(torch.empty(count, dim))
        # One weight for all experts: it has a gradient on every trainer, whichever experts its tokens chose.
        self.up_EFD = nn.Parameter(torch.empty(count, feedforward_dim, dim))
        self.up_bias_EF = nn.Parameter(torch.empty(count, feedforward_dim))
        self.down_EDF = nn.Parameter(torch.empty(count, dim, feedforward_dim))
        self.down_bias_ED = nn.Parameter(torch.empty(count, dim))

    def gates(self, x_ND: Tensor) -> Gates:
        """In float32 whatever autocast says; of equal probabilities the first expert's wins."""
        with without_autocast(x_ND.device):
            probs_NE = functional.linear(x_ND.float(), self.gate_ED.float()).softmax(1)
        best_NK = probs_NE.sort(dim=1, descending=True, stable=True).indices[:, : self.per_token]
        is_chosen_NE = torch.zeros_like(probs_NE, dtype=torch.bool).scatter(1, best_NK, True)
        return Gates(probs_NE, is_chosen_NE, best_NK)

    def forward(self, x_ND: Tensor, dropout: nn.Module, keys_N: Tensor | None = None) -> tuple[Tensor, Gates]:
        """Send each vector to its experts and sum what they give.

        Args:
            dropout: of the hidden values, a `KeyedDropout`.
            keys_N: for it; only while training.
        """
        gates = self.gates(x_ND)
        if keys_N is None and not torch.is_grad_enabled():
            if len(x_ND) <= MOST_DENSE:
                return self._all(x_ND, gates), gates
            # The host knows how many each expert has without waiting.
            if not values_may_decide(x_ND.device):
                return self.in_blocks(x_ND, gates), gates
        return self._chosen(x_ND, gates, dropout, keys_N), gates

    def _all(self, x_ND: Tensor, gates: Gates) -> Tensor:
        """Every expert for every token: nobody has to know how many chose which."""
        weights_NE = gates.probs_NE * gates.is_chosen_NE
        y_ND = torch.zeros_like(x_ND)
        for expert, weights in enumerate(self._experts()):
            y_ND = y_ND + (_through(x_ND, weights) * weights_NE[:, expert, None]).to(y_ND.dtype)
        return y_ND

    def _chosen(self, x_ND: Tensor, gates: Gates, dropout: nn.Module, keys_N: Tensor | None) -> Tensor:
        """Each expert for its tokens; how many these are is waited for once."""
        num_chosen = gates.best_NK.shape[1]
        order_M = gates.best_NK.flatten().argsort(stable=True)  # of all choices, expert after expert
        token_M = order_M.div(num_chosen, rounding_mode="floor")
        counts = gates.is_chosen_NE.sum(0).tolist()
        parts = []
        for weights, tokens, x_PD in zip(
            self._experts(), token_M.split(counts), x_ND[token_M].split(counts), strict=True
        ):
            if not len(tokens):
                continue
            keys_P = None if keys_N is None else keys_N[tokens]
            parts.append(_through(x_PD, weights, dropout, keys_P))
        if not parts:
            return torch.zeros_like(x_ND)
        place_M = order_M.argsort()  # of each choice among them
        return _mixed(torch.cat(parts)[place_M].unflatten(0, (-1, num_chosen)), gates, x_ND.dtype)

    def in_blocks(self, x_ND: Tensor, gates: Gates) -> Tensor:
        """Each expert for its tokens and for some padding; nobody has to know how many choose which."""
        num_chosen, num_experts = gates.best_NK.shape[1], gates.probs_NE.shape[1]
        expert_M, order_M = gates.best_NK.flatten().sort(stable=True)
        counts_E = gates.is_chosen_NE.sum(0)
        num_blocks_E = (counts_E + BLOCK - 1) // BLOCK
        ends_E = num_blocks_E.cumsum(0)
        # Of each choice, expert after expert: its place among those of its expert, and its slot.
        place_M = torch.arange(len(order_M), device=x_ND.device) - (counts_E.cumsum(0) - counts_E)[expert_M]
        slot_M = (ends_E - num_blocks_E)[expert_M] * BLOCK + place_M
        most_blocks = len(order_M) // BLOCK + num_experts
        # What is left of the blocks is padding, for which any token and any expert will do.
        token_X = slot_M.new_zeros(most_blocks * BLOCK).scatter(0, slot_M, order_M // num_chosen)
        expert_G = torch.searchsorted(ends_E, torch.arange(most_blocks, device=x_ND.device), right=True)
        expert_G = expert_G.clamp(max=num_experts - 1)
        size = max(1, MAX_WEIGHTS // self.up_EFD[0].numel())
        parts = [
            self._blocks(x_ND[token_GT], expert_G)
            for token_GT, expert_G in zip(
                token_X.unflatten(0, (-1, BLOCK)).split(size), expert_G.split(size), strict=True
            )
        ]
        slot_NK = torch.empty_like(slot_M).scatter(0, order_M, slot_M).view_as(gates.best_NK)
        return _mixed(torch.cat(parts).flatten(0, 1)[slot_NK], gates, x_ND.dtype)

    def _blocks(self, x_GTD: Tensor, expert_G: Tensor) -> Tensor:
        """[G, T, D] of blocks of one expert each."""
        up_GDF, down_GFD = (weight[expert_G].transpose(1, 2) for weight in (self.up_EFD, self.down_EDF))
        hidden_GTF = functional.gelu(torch.baddbmm(self.up_bias_EF[expert_G, None], x_GTD, up_GDF))
        return torch.baddbmm(self.down_bias_ED[expert_G, None], hidden_GTF, down_GFD)

    def _experts(self) -> Iterator[tuple[Tensor, ...]]:
        """The weights of each."""
        weights = (self.up_EFD, self.up_bias_EF, self.down_EDF, self.down_bias_ED)
        return zip(*(weight.unbind() for weight in weights), strict=True)


def _mixed(out_NKD: Tensor, gates: Gates, dtype: torch.dtype) -> Tensor:
    """[N, D] what the chosen experts made of each token, times their probabilities."""
    return (out_NKD * gates.probs_NE.gather(1, gates.best_NK)[:, :, None]).sum(1).to(dtype)


def _through(
    x_ND: Tensor,
    expert: tuple[Tensor, ...],
    dropout: nn.Module | None = None,
    keys_N: Tensor | None = None,
) -> Tensor:
    """[N, D] of one expert, with its weights."""
    up_FD, up_bias_F, down_DF, down_bias_D = expert
    hidden_NF = functional.gelu(functional.linear(x_ND, up_FD, up_bias_F))
    if dropout is not None and keys_N is not None:
        hidden_NF = dropout(hidden_NF, keys_N)
    return functional.linear(hidden_NF, down_DF, down_bias_D)


def balance_losses(gates: Gates, rows: JaggedLayout) -> Tensor:
    """[S] the balance loss of each sequence; summed over those of a row, T E Σ_e f_e P_e of its T sequences.

    Args:
        gates: of the tokens of S sequences, as many of each.
        rows: which sequences belong to which row.
    """
    probs_SQE = gates.probs_NE.unflatten(0, (rows.num_tokens, -1))
    chosen_SE = gates.is_chosen_NE.view(probs_SQE.shape).sum(1)
    # Sums of integers, which do not depend on their order.
    before_S1E = functional.pad(chosen_SE.cumsum(0), (0, 0, 1, 0))
    offsets_B1 = torch.from_numpy(rows.offsets_B1).to(rows.device)
    chosen_BE = before_S1E[offsets_B1[1:]] - before_S1E[offsets_B1[:-1]]
    share_BE = chosen_BE / chosen_BE.sum(1, keepdim=True).clamp(min=1)
    return probs_SQE.shape[2] * (probs_SQE.mean(1) * share_BE[rows.row_N]).sum(1)

"""Which events of a long history a short context is made of: the newest, and those that fit what is wanted.

    instruction, mean of the newest events ─► query ──┐ inner product
    every older event's vector             ─► key   ──┴─► the best ─► with the newest, in order of time

The choice is not differentiable, so what chooses is trained by a loss of its own (`q2i_losses`, query to
item): of the target and the batch's negatives, the query has to find the target. It teaches the two
projections and nothing else: what they read is taken as it is, so that what is generated is trained as
without.

The negatives are those that the feature stage draws for the global batch from (seed, step), and not the
targets of the other rows: which of these are there depends on how a batch is divided among micro-batches
and trainers, and the loss with it.

A choice turns on single bits, and sums and matrix products round by where a row stands in a batch. So it is
computed in float64, the mean of the newest events included, and rounded to float32, which leaves equal events
equal; of these the newer is taken.

Source: the instruction-guided retrieval and the Q2I loss of OxygenREC, arXiv:2512.22386; there negatives are
those of the batch.

Axes: R rows, E events of all rows, T most events of a row, C chosen events of all rows, J newest events of a
row, S negatives, D width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.platform.devices import without_autocast


@dataclass(frozen=True)
class RetrievalSettings:
    num_events: int
    """Events that are chosen, the newest ones included."""
    num_recent: int
    """Newest events, which are always among them."""
    q2i_weight: float
    """Factor of the loss."""
    q2i_temperature: float


class HistoryRetrieval(nn.Module):
    """Chooses events, and learns how."""

    def __init__(self, dim: int, settings: RetrievalSettings, with_instruction: bool) -> None:
        super().__init__()
        self.settings = settings
        # No biases: that of keys would add the same to every score.
        self.query = nn.Linear(2 * dim if with_instruction else dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)

    def asked(self, recent_RJD: Tensor, is_there_RJ: Tensor, prefix_RPD: Tensor | None) -> Tensor:
        """float64, what queries are made of: instruction and summary of the newest events, side by side.

        Args:
            recent_RJD: vectors of the newest events; where `is_there_RJ` is not, of none.
            prefix_RPD: tokens of the instruction, if the network reads any.
        """
        count_R1 = is_there_RJ.sum(1, keepdim=True).clamp(min=1)
        summary_RD = (recent_RJD.double() * is_there_RJ[:, :, None]).sum(1) / count_R1
        parts = [summary_RD] if prefix_RPD is None else [prefix_RPD.double().sum(1), summary_RD]
        return torch.cat(parts, dim=1).detach()

    @torch.no_grad()
    def choose(self, asked_R: Tensor, vectors_ED: Tensor, events: JaggedLayout) -> tuple[Tensor, np.ndarray]:
        """Choose the events that each query attends to.

        Args:
            asked_R: of `asked`.
            vectors_ED: of all events.

        Returns:
            ([C] indices of the chosen events, row after row in order of time, [R] how many of each row).
        """
        stop_R = torch.from_numpy(events.offsets_B1[1:]).to(events.device)
        age_E = stop_R[events.row_N] - 1 - torch.arange(events.num_tokens, device=events.device)
        scores_E = self._scores(asked_R, vectors_ED, events.row_N)
        scores_E = scores_E.masked_fill(age_E < self.settings.num_recent, torch.inf)
        scores_RT = scores_E.new_full((events.num_rows, events.longest), -torch.inf)
        scores_RT[events.row_N, age_E] = scores_E  # newest first, so that the newer of equal ones wins
        lengths_R = np.minimum(events.lengths_B, self.settings.num_events)
        best_RT = scores_RT.sort(dim=1, descending=True, stable=True).indices[:, : self.settings.num_events]
        is_chosen_RT = torch.zeros_like(scores_RT, dtype=torch.bool).scatter_(1, best_RT, True)
        is_chosen_E = is_chosen_RT[events.row_N, age_E]
        # As many as the host knows of: to count them would be to wait for an accelerator.
        chosen_first_E = (~is_chosen_E).to(torch.int8).argsort(stable=True)
        return chosen_first_E[: int(lengths_R.sum())], lengths_R

    def _scores(self, asked_R: Tensor, vectors_ED: Tensor, row_E: Tensor) -> Tensor:
        """[E] float32: query · key of each event, with the key's projection moved to the query's side."""
        with without_autocast(asked_R.device):
            query_RD = functional.linear(asked_R.double(), self.query.weight.double())
            query_RD = query_RD @ self.key.weight.double()
            return (query_RD[row_E] * vectors_ED.double()).sum(1).float()

    def q2i_losses(
        self, asked_R: Tensor, targets_R: Tensor, negatives_S: Tensor, vectors_RD: Tensor, vectors_SD: Tensor
    ) -> Tensor:
        """[R] minus the log-probability of each row's target among it and the negatives; in float32 whatever
        autocast says.

        Args:
            targets_R: catalog positions; a negative that is the target is left out.
            vectors_RD: of the targets; no gradient goes there.
            vectors_SD: of the negatives, likewise.
        """
        with without_autocast(asked_R.device):
            # The weights may be held in bfloat16.
            query_weight, key_weight = self.query.weight.float(), self.key.weight.float()
            query_RD = functional.linear(asked_R.float(), query_weight) / self.settings.q2i_temperature
            target_R = (query_RD * functional.linear(vectors_RD.detach().float(), key_weight)).sum(1)
            negative_RS = query_RD @ functional.linear(vectors_SD.detach().float(), key_weight).T
        negative_RS = negative_RS.masked_fill(negatives_S[None, :] == targets_R[:, None], -torch.inf)
        return torch.cat([target_R[:, None], negative_RS], dim=1).logsumexp(1) - target_R

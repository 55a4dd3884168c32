"""What is wanted of the next item, as tokens that a decoder reads before it begins.

    scenario ─┐
    behavior ├─► [S, P, D] tokens, one per part ─► in front of the start token of each sequence
    trigger  ─┘

The trigger is the item that the user is looking at. In training, a target's instruction is what its own event
says, and its trigger is the newest event before it; at requests, the trigger becomes the newest event of the
history (`SequenceFeatures.with_triggers`). Each part is left out by chance, and then has the vector of a part
that nothing is said of, as at requests without. Most requests say nothing at all, which chances of the parts
alone would hardly ever train; so all parts are left out together as often as each is by itself.

Different from OxygenREC (arXiv:2512.22386), where instructions come of a language model and of more features:
the labels that a log has, and the trigger.

Axes: S sequences, P parts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.keyed_random import keyed_chance
from rayrec.models.sequence.backbones.transformer import INITIAL_STD
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.event_labels import PARTS, UNKNOWN, Label

Instruction = dict[str, Tensor]
"""By part [S]: the code of a label, the catalog position of the trigger, or -1."""


class EventLabels(nn.Module):
    """A vector for every code of some labels of a history's events.

    An unknown one adds nothing: a log has a label of all of its events or hardly ever lacks one, so a vector
    of the unknown would not be trained, and be all there is of a history that comes with a request.
    """

    def __init__(self, dim: int, sizes: Mapping[Label, int]) -> None:
        """
        Args:
            sizes: number of codes of each label.
        """
        super().__init__()
        self.vectors = nn.ParameterDict(
            {
                label: nn.Parameter(torch.empty(size, dim).normal_(std=INITIAL_STD))
                for label, size in sizes.items()
            }
        )

    def forward(self, labels: Mapping[str, Tensor]) -> Tensor:
        """[N, D] of events, summed over the labels.

        Args:
            labels: [N] codes of the events, by label.
        """
        return torch.stack([self._of(labels[label], label) for label in self.vectors]).sum(0)

    def _of(self, codes_N: Tensor, label: str) -> Tensor:
        vectors_ND = functional.embedding(codes_N.clamp(min=0), self.vectors[label])
        return vectors_ND * (codes_N != UNKNOWN)[:, None]


class LabelVectors(nn.Module):
    """A vector for every code of some labels, and one for a code that is not said."""

    def __init__(self, dim: int, sizes: Mapping[Label, int]) -> None:
        """
        Args:
            sizes: number of codes of each label.
        """
        super().__init__()
        self.vectors = nn.ParameterDict(
            {
                label: nn.Parameter(torch.empty(1 + size, dim).normal_(std=INITIAL_STD))
                for label, size in sizes.items()
            }
        )

    def forward(self, label: str, codes: Tensor) -> Tensor:
        """[..., D] vectors of codes [...]."""
        return functional.embedding(codes - UNKNOWN, self.vectors[label])


class InstructionPrefix(nn.Module):
    """Instructions as tokens; see the head of this file."""

    def __init__(self, dim: int, label_sizes: Mapping[Label, int], with_trigger: bool, drop: float) -> None:
        """
        Args:
            label_sizes: of the labels that are parts.
            with_trigger: whether the trigger is one.
            drop: probability with which training leaves each part of each target out, and likewise all.
        """
        super().__init__()
        self.labels = LabelVectors(dim, label_sizes)
        self.trigger_2D = nn.Parameter(torch.empty(2, dim).normal_(std=INITIAL_STD)) if with_trigger else None
        """Of no trigger, and what is added to the vector of one."""
        self.drop = drop
        self.parts = tuple(
            part for part in PARTS if part in label_sizes or (with_trigger and part == "trigger_item")
        )

    def of_targets(self, batch: TensorBatch, event_S: Tensor) -> Instruction:
        """What the events behind these say of themselves; in training, with parts left out.

        Args:
            event_S: index of the newest event before each target.
        """
        instruction: Instruction = {}
        # A chance of its own, whichever parts there are.
        is_bare_S = keyed_chance(batch.keys_N[event_S], self.drop, len(PARTS)) if self.training else None
        for index, part in enumerate(self.parts):
            said_N = batch.items_N if part == "trigger_item" else batch.target_labels[part]
            said_S = said_N[event_S]
            if is_bare_S is not None:
                is_left_out_S = is_bare_S | keyed_chance(batch.keys_N[event_S], self.drop, index)
                said_S = said_S.masked_fill(is_left_out_S, UNKNOWN)
            instruction[part] = said_S
        return instruction

    def of_requests(self, batch: TensorBatch) -> Instruction:
        """What is wanted by each row of a batch to be ranked for."""
        nothing_B = torch.full((batch.layout.num_rows,), UNKNOWN, device=batch.layout.device)
        return {part: batch.instruction.get(part, nothing_B) for part in self.parts}

    def forward(self, instruction: Instruction, item_vectors: Callable[[Tensor], Tensor]) -> Tensor:
        """[S, P, D] tokens.

        Args:
            item_vectors: [S, D] of catalog positions [S].
        """
        return torch.stack([self._token(part, instruction[part], item_vectors) for part in self.parts], dim=1)

    def _token(self, part: str, said_S: Tensor, item_vectors: Callable[[Tensor], Tensor]) -> Tensor:
        if part != "trigger_item":
            return self.labels(part, said_S)
        assert self.trigger_2D is not None, "it is a part"
        is_said_S = said_S != UNKNOWN
        item_SD = item_vectors(said_S.clamp(min=0)) * is_said_S[:, None]
        return item_SD + functional.embedding(is_said_S.long(), self.trigger_2D)

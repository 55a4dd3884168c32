"""Prefixes of codes on their way down the trie, those of every row side by side.

All ways of decoding (beam search, sampling with and without replacement) differ in which children they go on
with, and in nothing else. A child is a node of the trie, so no result can be an invalid tuple; rows advance
together, and no value travels from the device to the host.

A prefix that only one item has is *closed*: its further codes are certain, whatever a model says. Where that
can be known without waiting for a device, on the CPU, no model is asked about it.

Axes: B rows, W prefixes of a row, V open ones, R rows of S children (`Children`), K codes of a level.

Source: prefix-constrained decoding, De Cao et al., arXiv:2010.00904, with each step's distribution
renormalized over the allowed codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.decoding.children import Children
from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.trie import CodeTrie
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import values_may_decide

Step = Callable[[int, Tensor, Tensor | None], Tensor]
"""`step(depth, codes_BWd, parent_BW) -> logits_BWK`: scores of the next code of every prefix.

`codes_BWd` ([B, W, depth] int64) are the codes decoded so far and `parent_BW`
([B, W] int64) the prefix of the call before from which each one grew: what a
step must reorder its caches by. At depth 0 there is one empty prefix per row and
no parent (None). W differs from depth to depth, and once no item is left to
choose there are no more calls. Prefixes that are none (a row may have fewer than
W) repeat an arbitrary one; their logits are ignored.
"""


JaggedStep = Callable[[int, Tensor, Tensor, Int64Array], Tensor]
"""`step(depth, codes_Nd, parent_N, counts_B) -> logits_NK`: the same of prefixes one after the other, where
rows have different numbers of them.

`parent_N` are indices among the N of the call before; that at depth 0, of `Step`, has one prefix per row.
"""


@dataclass(frozen=True)
class ItemDistribution:
    """What a model says of the items of each row: a probability for every item that may be given.

    At every depth the logits are normalized over the node's children that lead to such an item. The
    probabilities of a row's items therefore sum to one, and leave no mass on tuples that name no item. It is
    decoded once: the caches of `step` grow with it.

    Raises:
        ValueError: a temperature that is not positive.
    """

    step: Step
    trie: CodeTrie
    """On the device where `step` computes."""
    num_rows: int
    leaf_filter: LeafFilter | None = None
    """What each row may be given; everything without."""
    temperature: float = 1.0
    """Logits are divided by it."""
    renormalized: bool = True
    """Whether the filter is part of the distribution, so that what may not be given leaves its probability to
    what may. Without, items keep theirs, and the sum is below one: a ranking, but no way of drawing."""
    jagged_step: JaggedStep | None = None
    """Asked instead of `step` from depth 1 on, about no more prefixes than there are, where their number is
    known without waiting for a device; None: rows are filled up."""

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")


class Prefixes:
    """What has been decoded of every row so far; begins with one empty prefix each."""

    def __init__(self, distribution: ItemDistribution, by_code: bool = False) -> None:
        """
        Args:
            by_code: keep the log-probability of each code besides those of whole prefixes.
        """
        trie, num_rows = distribution.trie, distribution.num_rows
        self._distribution = distribution
        self.nodes_BW = torch.zeros(num_rows, 1, dtype=torch.int64, device=trie.device)
        self._codes_BWd = torch.zeros(num_rows, 1, 0, dtype=torch.int64, device=trie.device)
        self._parent_BW: Tensor | None = None
        """Place of each prefix's parent among those that the step was last asked about."""
        self._place_BW: Tensor | None = None
        """Place of each prefix among those that the step was just asked about, of its row, or of all rows
        where the step is jagged; None if these are all."""
        self.children: Children
        """Of which `expand` gave log-probabilities."""
        self._step_log_probs_BRS: Tensor
        self.log_probs_BW = torch.zeros(num_rows, 1, device=trie.device)
        """Of each prefix; -inf for one that is none."""
        self.code_log_probs_BWd: Tensor | None = None
        """Of each code of each prefix, given those before it; None unless asked for."""
        if by_code:
            self.code_log_probs_BWd = torch.zeros(num_rows, 1, 0, device=trie.device)

    def expand(self, depth: int) -> Tensor:
        """[B, R, S] log-probabilities of each prefix's next codes; -inf where no child may be given.

        Codes of a prefix ascend, as its children do. An only child is certain. A prefix with several children
        and a logit that is no number has none.
        """
        trie, leaf_filter = self._distribution.trie, self._distribution.leaf_filter
        leaves = trie.first_leaves[depth + 1]
        children = self.children = Children.of(trie, depth, self.nodes_BW)
        is_child_BRS = may_follow_BRS = children.is_child_BRS
        if leaf_filter is not None:
            nodes_BN = children.nodes_BRS.flatten(1)
            is_given_BN = leaf_filter.admits(leaves[nodes_BN], leaves[nodes_BN + 1])
            may_follow_BRS = is_child_BRS & is_given_BN.view_as(is_child_BRS)
            if self._distribution.renormalized:
                is_child_BRS = may_follow_BRS
        log_probs_BRS = self._asked(depth, is_child_BRS)
        if may_follow_BRS is not is_child_BRS:
            log_probs_BRS = log_probs_BRS.masked_fill(~may_follow_BRS, -torch.inf)
        self._step_log_probs_BRS = log_probs_BRS
        self.log_probs_BW = self.log_probs_BW.to(log_probs_BRS.dtype)
        return log_probs_BRS

    def _open(self, depth: int) -> Tensor | None:
        """[B, W] whether a prefix is to be asked about; None if all are."""
        if depth == 0:
            return None  # one per row; and the type of its logits is that of all results
        if not values_may_decide(self.nodes_BW.device):
            # Their number depends on the data: a program of fixed shapes asks about all, and on a device
            # waiting for it would cost more than the few that are closed.
            return None
        first = self._distribution.trie.first_leaves[depth]
        is_open_BW = first[self.nodes_BW + 1] - first[self.nodes_BW] > 1
        is_open_BW &= self.log_probs_BW > -torch.inf
        return None if is_open_BW.all() and self._distribution.jagged_step is None else is_open_BW

    def _asked(self, depth: int, is_child_BRS: Tensor) -> Tensor:
        """[B, R, S] log-probabilities of the children, by the model where it is to be asked."""
        children = self.children
        codes_BRS = children.codes_BRS
        is_open_BW = self._open(depth)
        self._place_BW = None
        if is_open_BW is None:
            logits_BWK = self._distribution.step(depth, self._codes_BWd, self._parent_BW)
            logits_BRS = _of_codes(logits_BWK, children.prefix_BR, codes_BRS)
        elif not is_open_BW.any():
            return torch.zeros_like(codes_BRS, dtype=self.log_probs_BW.dtype).masked_fill_(
                ~is_child_BRS, -torch.inf
            )
        elif self._distribution.jagged_step is not None:
            logits_BRS = self._asked_jagged(depth, self._distribution.jagged_step, is_open_BW, codes_BRS)
        else:
            logits_BRS = self._asked_filled_up(depth, is_open_BW, codes_BRS)
        # Half precision is widened: its log-probabilities would tie.
        logits_BRS = logits_BRS.to(torch.promote_types(logits_BRS.dtype, torch.float32))
        if self._distribution.temperature != 1.0:
            logits_BRS = logits_BRS / self._distribution.temperature
        logits_BRS = logits_BRS.masked_fill(~is_child_BRS, -torch.inf)
        # A row that may be given nothing has no child at all, nor has a prefix that is not one.
        log_probs_BRS = children.log_softmax(logits_BRS).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        # A closed prefix that was not asked about has one child and the logits of another prefix.
        is_only_BRS = is_child_BRS & (children.count(is_child_BRS) == 1)[:, :, None]
        return log_probs_BRS.masked_fill(is_only_BRS, 0.0)

    def _asked_filled_up(self, depth: int, is_open_BW: Tensor, codes_BRS: Tensor) -> Tensor:
        """[B, R, S] logits, of rows with as many prefixes each as the one with the most open ones has."""
        assert self._parent_BW is not None, "all are asked about at depth 0"
        num_open = int(is_open_BW.sum(dim=1).max())
        open_first_BW = is_open_BW.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        open_BV = open_first_BW[:, :num_open]
        ordinals_BV = torch.arange(num_open, device=open_BV.device).expand_as(open_BV)
        self._place_BW = torch.zeros_like(self.nodes_BW).scatter_(1, open_BV, ordinals_BV)
        codes_BVd = self._codes_BWd.gather(1, open_BV[:, :, None].expand(-1, -1, depth))
        logits_BVK = self._distribution.step(depth, codes_BVd, self._parent_BW.gather(1, open_BV))
        return _of_codes(logits_BVK, self.children.of_prefix(self._place_BW), codes_BRS)

    def _asked_jagged(self, depth: int, step: JaggedStep, is_open_BW: Tensor, codes_BRS: Tensor) -> Tensor:
        """[B, R, S] logits, of the open prefixes alone."""
        assert self._parent_BW is not None, "all are asked about at depth 0"
        if depth == 1:  # where all have the one of their row
            row_B = torch.arange(len(is_open_BW), device=is_open_BW.device)
            self._parent_BW = row_B[:, None].expand_as(is_open_BW)
        counts_B = is_open_BW.sum(dim=1).numpy()
        logits_NK = step(depth, self._codes_BWd[is_open_BW], self._parent_BW[is_open_BW], counts_B)
        # One that is not asked about gets the logits of another; it has none of its own, or needs none.
        self._place_BW = is_open_BW.flatten().cumsum(0).sub_(1).clamp_(min=0).view_as(is_open_BW)
        place_BR = self.children.of_prefix(self._place_BW)
        return logits_NK[place_BR[:, :, None], codes_BRS]

    def keep(self, depth: int, place_BN: Tensor) -> None:
        """Go on with the children at these places among those that `expand` gave."""
        parent_BN = self.children.prefix_at(place_BN)
        self.nodes_BW = self.children.nodes_BRS.flatten(1).gather(1, place_BN)
        grown_BN = self._step_log_probs_BRS.flatten(1).gather(1, place_BN)
        self.log_probs_BW = self.log_probs_BW.gather(1, parent_BN) + grown_BN
        if self.code_log_probs_BWd is not None:
            before_BNd = self.code_log_probs_BWd.gather(1, parent_BN[:, :, None].expand(-1, -1, depth))
            self.code_log_probs_BWd = torch.cat((before_BNd.to(grown_BN.dtype), grown_BN[:, :, None]), dim=2)
        codes_BNd = self._codes_BWd.gather(1, parent_BN[:, :, None].expand(-1, -1, depth))
        next_BN1 = self._distribution.trie.child_codes[depth][self.nodes_BW][:, :, None]
        self._codes_BWd = torch.cat((codes_BNd, next_BN1), dim=2)
        self._parent_BW = parent_BN if self._place_BW is None else self._place_BW.gather(1, parent_BN)

    def found(self) -> tuple[Tensor, Tensor]:
        """([B, W] items, [B, W] log-probabilities)."""
        is_item_BW = self.log_probs_BW > -torch.inf
        return self._distribution.trie.leaf_items_I[self.nodes_BW].masked_fill(
            ~is_item_BW, -1
        ), self.log_probs_BW


def _of_codes(logits_BWK: Tensor, place_BR: Tensor | None, codes_BRS: Tensor) -> Tensor:
    """[B, R, S] logits of codes.

    Args:
        place_BR: whose logits they are among; None: the prefix in the same place.
    """
    if place_BR is None:
        return logits_BWK.gather(2, codes_BRS)
    place_BN = (place_BR[:, :, None] * logits_BWK.shape[2] + codes_BRS).flatten(1)
    return logits_BWK.flatten(1).gather(1, place_BN).view_as(codes_BRS)


def item_log_probs(distribution: ItemDistribution, items_BW: Tensor) -> Tensor:
    """[B, W] log-probability of each item: what a learner asks of items that were drawn elsewhere.

    Differentiable where `step` is.

    Args:
        items_BW: catalog positions; -1, like an item that may not be given, has -inf.
    """
    return _grown(distribution, items_BW, by_code=False).log_probs_BW.masked_fill(items_BW < 0, -torch.inf)


def item_code_log_probs(distribution: ItemDistribution, items_BW: Tensor) -> Tensor:
    """[B, W, L] the same of each code of an item, given those before it: they add up to `item_log_probs`.

    A code without an alternative has exactly 0.
    """
    log_probs_BWL = _grown(distribution, items_BW, by_code=True).code_log_probs_BWd
    assert log_probs_BWL is not None, "it was asked for"
    return log_probs_BWL.masked_fill((items_BW < 0)[:, :, None], -torch.inf)


def _grown(distribution: ItemDistribution, items_BW: Tensor, by_code: bool) -> Prefixes:
    """The prefixes of known items."""
    trie, num_rows = distribution.trie, distribution.num_rows
    nodes_BWL = trie.nodes_IL[items_BW.clamp(min=0)]
    prefixes = Prefixes(distribution, by_code)
    ordinals_BW = torch.arange(items_BW.shape[1], device=trie.device).expand(num_rows, -1)
    for depth in range(trie.depth):
        prefixes.expand(depth)
        first_BW = nodes_BWL[:, :, depth - 1] if depth else torch.zeros_like(items_BW)
        # All items grow from the empty prefix, and then each from its own.
        parent_BW = ordinals_BW if depth else torch.zeros_like(items_BW)
        child_BW = nodes_BWL[:, :, depth] - trie.child_offsets[depth][first_BW]
        prefixes.keep(depth, prefixes.children.place(parent_BW, child_BW))
    return prefixes

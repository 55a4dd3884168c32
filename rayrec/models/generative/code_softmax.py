"""Among which codes a network is trained to choose: all of a level, or those that lead to an item.

Items are found along the trie of their codes either way. Trained over all codes of a level, a network also
learns which codes follow each other, which the trie knows; trained among children, it learns the distribution
that items are found by, and nothing else.

Axes: as in `backbone`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.decoding.children import log_probs_among_children
from rayrec.models.decoding.trie import CodeTrie


class CodeSoftmax:
    """What logits of codes mean as probabilities."""

    def __init__(self, trie: CodeTrie | None = None, label_smoothing: float = 0.0) -> None:
        """
        Args:
            trie: of the codes of the catalog; a level's softmax is over those that lead to an item. None: it
                is over all codes of the level. It may have levels more, which are not looked at.
            label_smoothing: of the softmax over all codes.
        """
        assert trie is None or not label_smoothing, "smoothing is over all codes"
        self._trie = trie
        self.label_smoothing = label_smoothing

    def losses(self, logits: Iterable[Tensor], codes_NL: Tensor) -> Tensor:
        """[N] minus the log-probability of each sequence of codes, smoothed.

        Args:
            logits: [N, K] of every level, each after the codes before it.
        """
        if self._trie is not None:
            one_each = (logits_NK.float()[:, None, :] for logits_NK in logits)
            trie = self._trie.to(codes_NL.device)
            return -log_probs_among_children(trie, one_each, codes_NL[:, None, :]).sum(dim=(1, 2))
        losses = [
            functional.cross_entropy(
                logits_NK.float(), codes_NL[:, level], reduction="none", label_smoothing=self.label_smoothing
            )
            for level, logits_NK in enumerate(logits)
        ]
        return torch.stack(losses).sum(0)

    def log_probs(self, logits: Iterable[Tensor], codes_BWL: Tensor) -> Tensor:
        """[B, W, L] log-probability of each code of sequences; -inf for one that leads to no item, where the
        softmax is over those that do.

        Args:
            logits: [B, W, K] of every level, each after the codes before it.
        """
        if self._trie is not None:
            return log_probs_among_children(self._trie.to(codes_BWL.device), logits, codes_BWL)
        log_probs = [
            logits_BWK.log_softmax(dim=2).gather(2, codes_BWL[:, :, level, None])[:, :, 0]
            for level, logits_BWK in enumerate(logits)
        ]
        return torch.stack(log_probs, dim=2)


ALL_CODES = CodeSoftmax()

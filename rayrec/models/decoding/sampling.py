"""Items drawn from the model, with the exact probability of each: what RL needs of its rollouts.

A beam's items have no probability of having been chosen; these have: that of `ItemDistribution`, filter and
temperature included. A learner that is to weigh these items uses the same trie, filter and temperature.

    constrained_sample       W items, each drawn for itself: items may come twice
    stochastic_beam_search   W distinct items: a sample without replacement, in the order of the draw

Noise comes from the caller's generator, one number per candidate, all rows at once.

Axes: B rows, W items of a row, R rows of S children (`Children`).

Sources: Gumbel-max sampling (Gumbel, 1954; Maddison et al., NeurIPS 2014); sampling sequences without
replacement by a beam search over perturbed log-probabilities, Kool, van Hoof and Welling, ICML 2019,
arXiv:1903.06059, Algorithm 1 and Appendix B.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.decoding.prefixes import ItemDistribution, Prefixes
from rayrec.models.decoding.trie import CodeTrie


@dataclass(frozen=True)
class SampledItems:
    """Items of each row in the order in which they were drawn."""

    items_BW: Tensor
    """[B, W] int64 catalog positions; -1 where a row has no (further) item to give."""
    log_probs_BW: Tensor
    """[B, W] log-probability of drawing the item at once; -inf at -1."""
    code_log_probs_BWL: Tensor
    """[B, W, L] of each of its codes, given those before it; -inf at -1 in at least one of them."""


@dataclass(frozen=True)
class DistinctItems(SampledItems):
    """A sample without replacement."""

    log_threshold_B: Tensor
    """Perturbed log-probability of the first item that was not drawn, -inf if there is none left."""

    def log_inclusion_BW(self) -> Tensor:
        """[B, W] log-probability that the item is in a sample with this threshold: log(1 - exp(-exp(φ - κ))).

        An expectation over the distribution is estimated by the sum over items of p / q times the value
        (Kool et al., 2019, eq. 9; Vieira, 2017).
        """
        log_rate_BW = self.log_probs_BW - self.log_threshold_B[:, None]
        return torch.where(self.items_BW < 0, -torch.inf, (-torch.expm1(-log_rate_BW.exp())).log())


def constrained_sample(
    distribution: ItemDistribution, num_samples: int, generator: torch.Generator
) -> SampledItems:
    """Draw items of each row independently of each other.

    Args:
        num_samples: W. From depth 1 on, the model is asked for as many prefixes per row.
        generator: On the device of the trie.

    Raises:
        ValueError: no samples.
    """
    trie, _ = _drawn_from(distribution, num_samples)
    prefixes = Prefixes(distribution, by_code=True)
    for depth in range(trie.depth):
        log_probs_BRS = prefixes.expand(depth)
        if depth == 0:  # all of them grow from the empty prefix, and then each from itself
            log_probs_BWC = log_probs_BRS.expand(-1, num_samples, -1)
            prefixes.keep(depth, (log_probs_BWC + _gumbel(log_probs_BWC, generator)).argmax(dim=2))
        else:
            noisy_BRS = log_probs_BRS + _gumbel(log_probs_BRS, generator)
            prefixes.keep(depth, prefixes.children.place_of_largest(noisy_BRS))
    return SampledItems(*prefixes.found(), _by_code(prefixes))


def stochastic_beam_search(
    distribution: ItemDistribution, num_samples: int, generator: torch.Generator
) -> DistinctItems:
    """Draw distinct items of each row, as if one after the other without putting any back.

    As `constrained_sample`; the model is asked for up to W + 1 prefixes per row.
    """
    trie, num_rows = _drawn_from(distribution, num_samples)
    prefixes = Prefixes(distribution, by_code=True)
    # One more than wanted: what it has is the threshold that those drawn have passed.
    width = num_samples + 1
    root_B1 = torch.zeros(num_rows, 1, device=trie.device)
    perturbed_BW = _gumbel(root_B1, generator)
    for depth in range(trie.depth):
        log_probs_BRS, children = prefixes.expand(depth), prefixes.children
        if depth == 0:
            perturbed_BW = perturbed_BW.to(log_probs_BRS.dtype)
        noisy_BRS = children.of_prefix(prefixes.log_probs_BW)[:, :, None] + log_probs_BRS
        noisy_BRS = noisy_BRS + _gumbel(noisy_BRS, generator)
        conditioned_BRS = _conditioned(
            noisy_BRS, children.largest(noisy_BRS)[:, :, None], children.of_prefix(perturbed_BW)[:, :, None]
        )
        chosen = conditioned_BRS.flatten(1)
        perturbed_BW, place_BW = chosen.topk(min(width, chosen.shape[1], trie.num_nodes(depth + 1)), dim=1)
        prefixes.keep(depth, place_BW)
    items_BW, log_probs_BW = prefixes.found()
    code_log_probs_BWL = _by_code(prefixes)
    missing = width - items_BW.shape[1]
    items_BW = torch.nn.functional.pad(items_BW, (0, missing), value=-1)
    log_probs_BW = torch.nn.functional.pad(log_probs_BW, (0, missing), value=-torch.inf)
    perturbed_BW = torch.nn.functional.pad(perturbed_BW, (0, missing), value=-torch.inf)
    code_log_probs_BWL = torch.nn.functional.pad(code_log_probs_BWL, (0, 0, 0, missing), value=-torch.inf)
    return DistinctItems(
        items_BW[:, :num_samples],
        log_probs_BW[:, :num_samples],
        code_log_probs_BWL[:, :num_samples],
        perturbed_BW[:, num_samples],
    )


def _by_code(prefixes: Prefixes) -> Tensor:
    assert prefixes.code_log_probs_BWd is not None, "it was asked for"
    return prefixes.code_log_probs_BWd


def _drawn_from(distribution: ItemDistribution, num_samples: int) -> tuple[CodeTrie, int]:
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    return distribution.trie, distribution.num_rows


def _gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise in the shape of a tensor."""
    # Of an exponential rather than a uniform number: no logarithm of 0 or 1.
    return -torch.empty_like(like).exponential_(generator=generator).log()


def _conditioned(noisy_BRS: Tensor, largest_BR1: Tensor, maximum_BR1: Tensor) -> Tensor:
    """Gumbels of children, given that the largest of each prefix's is the prefix's own.

    -log(exp(-T) - exp(-Z) + exp(-G)) for Z the largest of the G, T the maximum, in the stable form of Kool
    et al., 2019, Appendix B.3. Children at -inf stay there, as do those of a prefix at -inf.
    """
    difference_BRS = maximum_BR1 - noisy_BRS + torch.log1p(-(noisy_BRS - largest_BR1).exp())
    shifted_BRS = maximum_BR1 - difference_BRS.clamp(min=0.0) - torch.log1p((-difference_BRS.abs()).exp())
    is_child_BRS = (noisy_BRS > -torch.inf) & (maximum_BR1 > -torch.inf)
    return torch.where(is_child_BRS, shifted_BRS, -torch.inf).nan_to_num(nan=-torch.inf, neginf=-torch.inf)

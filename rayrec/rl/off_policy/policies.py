"""Target policies for off-policy evaluation.

Axes: N rows, A actions, P positions.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from rayrec.platform.arrays import Float64Array
from rayrec.platform.errors import InputError
from rayrec.rl.off_policy.logs import BanditLog


def uniform(log: BanditLog) -> Float64Array:
    """[N, A] the same probability for every action that the request of the row could get."""
    could_NA = log.could_show_NA
    if could_NA is None:
        return np.full((len(log), log.num_actions), 1.0 / log.num_actions)
    probs_NA: Float64Array = could_NA / could_NA.sum(axis=1, keepdims=True)
    return probs_NA


def always(log: BanditLog, action: str) -> Float64Array:
    """[N, A] one action for everybody.

    Args:
        action: as the log has it.

    Raises:
        InputError: the log has no such action, or never shows it, or some of its requests could not.
    """
    names = [str(name) for name in log.action_names]
    if action not in names:
        raise InputError(
            f"{log.name}: there is no action {action!r}, so nothing can be told of it; there are "
            f"{', '.join(names)}"
        )
    number = names.index(action)
    if not (log.actions_N == number).any():
        raise InputError(
            f"{log.name}: the action {action!r} is known, but in no row, so nothing can be told of it; "
            "take a longer log, or one of a policy that takes it more often"
        )
    if log.could_show_RA is not None:
        assert log.requests_N is not None, "the lists are of requests"
        could_R = log.could_show_RA[:, number][np.unique(log.requests_N)]
        if not could_R.all():
            raise InputError(
                f"{log.name}: only {int(could_R.sum()):,} of {len(could_R):,} requests could show "
                f"{action!r}, so no policy shows it to all; keep these requests alone, or ask of a "
                "policy that orders what each request could show"
            )
    probs_NA = np.zeros((len(log), log.num_actions))
    probs_NA[:, number] = 1.0
    return probs_NA


def softmax_of(log: BanditLog, model_NA: Float64Array, temperature: float) -> Float64Array:
    """[N, A] softmax over a reward model: softmax(q / temperature), of the actions that a row could get.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    logits_NA, could_NA = model_NA / temperature, log.could_show_NA
    if could_NA is not None:
        logits_NA = np.where(could_NA, logits_NA, -np.inf)
    probs_NA: Float64Array = softmax(logits_NA, axis=1)
    return probs_NA


def logged_frequencies(log: BanditLog, of: BanditLog) -> Float64Array:
    """[N, A] frequency of each action in the log `of`, at the position of each row of `log`.

    Approximates a policy that logged only the probability of the chosen action, such as Thompson sampling.
    The mean of those probabilities would be biased: where they vary, an action is logged more often where it
    is likely.
    """
    assert log.num_actions == of.num_actions, "both logs are of one campaign"
    positions_N = np.zeros(len(log), dtype=np.int64) if log.positions_N is None else log.positions_N
    of_positions_M = np.zeros(len(of), dtype=np.int64) if of.positions_N is None else of.positions_N
    num_positions = 1 + int(max(positions_N.max(initial=0), of_positions_M.max(initial=0)))
    shape, index_M = (num_positions, log.num_actions), of_positions_M * log.num_actions + of.actions_N
    counts_PA = np.bincount(index_M, minlength=shape[0] * shape[1]).reshape(shape)
    found: Float64Array = (counts_PA / np.maximum(counts_PA.sum(axis=1, keepdims=True), 1))[positions_N]
    return found

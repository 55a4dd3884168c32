"""`off-policy`: off-policy evaluation from a log with propensities."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import refuse_without_effect
from rayrec.platform.console import Answer, command, print_rows
from rayrec.platform.console import log as console
from rayrec.platform.errors import InputError


class TargetPolicy(StrEnum):
    uniform = "uniform"
    softmax = "softmax"
    always = "always"


@command(app, "off-policy")
def off_policy_command(
    context: typer.Context,
    log_folder: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="Table of shown items with reward and propensity, or a folder with one, as the Open Bandit "
            "Dataset's bts/all; or a request log of `rayrec serve`.",
        ),
    ],
    policy: Annotated[
        TargetPolicy,
        typer.Option(
            help="Policy to evaluate: uniform, softmax over a reward model of the log, or always one action."
        ),
    ] = TargetPolicy.uniform,
    action: Annotated[str | None, typer.Option(help="Action of `always`.")] = None,
    temperature: Annotated[
        float, typer.Option(min=1e-6, help="Temperature of `softmax`, in units of reward.")
    ] = 0.002,
    resamples: Annotated[int, typer.Option(min=100, help="Bootstrap resamples.")] = 999,
    max_weight: Annotated[
        float | None, typer.Option(min=1, help="Clip importance weights to this value.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the folds and of the bootstrap.")] = 0,
) -> Answer:
    """Estimate the reward of a policy from the log of another one (off-policy evaluation)."""
    from dataclasses import asdict

    from rayrec.rl.off_policy.estimators import DIRECT_METHOD, diagnostics, estimates
    from rayrec.rl.off_policy.logs import read_log
    from rayrec.rl.off_policy.policies import always, softmax_of, uniform
    from rayrec.rl.off_policy.reward_model import cross_fitted, mean_rewards

    if (action is None) == (policy is TargetPolicy.always):
        raise InputError("--action says what --policy always does; give both of them, or none")
    if policy is not TargetPolicy.softmax:
        refuse_without_effect(context, {"temperature"}, "is of --policy softmax")
    log = read_log(log_folder)
    are_probabilities = bool(((log.rewards_N == 0) | (log.rewards_N == 1)).all())
    model_NA = cross_fitted(log, seed=seed) if are_probabilities else mean_rewards(log, seed=seed)
    # The model of a row has not seen the row's reward, so a policy derived from it can be evaluated there.
    if policy is TargetPolicy.always:
        assert action is not None, "checked above"
        target_NA = always(log, action)
    else:
        target_NA = uniform(log) if policy is TargetPolicy.uniform else softmax_of(log, model_NA, temperature)
    found = estimates(log, target_NA, model_NA, resamples, seed, max_weight)
    trust = diagnostics(log, target_NA)
    print_rows(
        f"{policy.value} {action or ''}".rstrip() + f" on {log_folder}",
        [
            ("rows, of which with a reward", f"{len(log):,}, {int((log.rewards_N > 0).sum()):,}"),
            ("mean reward of the policy that logged", f"{log.rewards_N.mean():.5f}"),
            *(
                (
                    name,
                    # Its interval is that of the model's mean, and says nothing of the model's bias.
                    f"{estimate.value:.5f} (no interval: it would not cover the bias of the model)"
                    if name == DIRECT_METHOD
                    else estimate.shown,
                )
                for name, estimate in found.items()
            ),
            ("effective number of rows", f"{trust.effective_rows:,.0f}"),
            ("largest weight, mean weight", f"{trust.largest_weight:.2f}, {trust.mean_weight:.3f}"),
        ],
    )
    if trust.is_implausible:
        if trust.mean_weight > 1:
            why = (
                f"the propensities of {log_folder} are not the chances with which its items were shown, or "
                "its requests could show more than their lists (a column candidates says what)"
            )
        else:
            why = (
                f"{log_folder} hardly has what the policy does, since it had no chance there or the log is "
                "too short, or its propensities are too large"
            )
        console.print(
            f"the mean weight is {trust.mean_weight:.3f}, too far from 1: {why}; the estimates mean nothing",
            markup=False,
        )
    return {
        "policy": policy.value,
        "num_rows": len(log),
        "estimates": {name: estimate._asdict() for name, estimate in found.items()},
        "diagnostics": asdict(trust),
    }

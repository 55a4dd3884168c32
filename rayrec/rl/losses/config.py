"""The table of policy losses, and the type of a config's entry that names one of them.

A new loss is a subclass of `PolicyLoss` and a line in `POLICY_LOSSES`, or an entry point of another package
in the group `rayrec.policy_losses`: docs/guides/add-a-policy-loss.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.platform.registry import Registry, settings_union
from rayrec.rl.losses.base import PolicyLoss

POLICY_LOSSES: Registry[type[PolicyLoss]] = Registry(
    "rayrec.policy_losses",
    "policy loss",
    {
        "reinforce": "rayrec.rl.losses.policy_gradient:ReinforceLoss",
        "grpo": "rayrec.rl.losses.policy_gradient:GrpoLoss",
        "gspo": "rayrec.rl.losses.policy_gradient:GspoLoss",
        "sapo": "rayrec.rl.losses.policy_gradient:SapoLoss",
        "sa_gcpo": "rayrec.rl.losses.policy_gradient:SaGcpoLoss",
        "ecpo": "rayrec.rl.losses.policy_gradient:EcpoLoss",
        "gbpo": "rayrec.rl.losses.policy_gradient:GbpoLoss",
        "dpo": "rayrec.rl.losses.preference:DpoLoss",
        "s_dpo": "rayrec.rl.losses.preference:SDpoLoss",
    },
)

if TYPE_CHECKING:
    PolicyLossConfig = PolicyLoss
else:
    PolicyLossConfig = settings_union(POLICY_LOSSES, PolicyLoss, "name")
"""One of the losses, chosen by `name`."""

"""Policy losses: what an RL step maximizes, by name.

`config.POLICY_LOSSES` is the table, `base.PolicyLoss` what a loss is, `terms` what losses are made of.
Numbers in, numbers out: no Ray, no models. May import `platform`.
"""

"""What a run takes on a cluster that need not exist: step time, bottleneck, failures, money, replicas.

    config + data ─► workload ─┐
    windows of real runs ─► calibrate ─► coefficients ─┼─► step_model ─► simulate ─► report
    configs/clusters/NAME.yaml ─► cluster_spec ────────┘

Start at `planner.plan_cluster`. May import everything of the room but `health`.
"""

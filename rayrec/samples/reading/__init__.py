"""The training read: plan, readers, cursor; row-exact and resumable.

Start at `read_plan.ReadPlan` and `reader.SampleReader`.
May import `operations` and what is below it.
"""

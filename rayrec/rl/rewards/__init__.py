"""Rewards of candidate lists: one class per reward, their weighted sum, and a guard that warns.

`config.REWARDS` is the table, `base` what a reward is and what it is given. No Ray, no torch.
May import `platform`, `samples` and `pipelines`.
"""

"""Rewards of lists that a policy drew: one object per reward, a weighted mix of them, and a guard over it."""

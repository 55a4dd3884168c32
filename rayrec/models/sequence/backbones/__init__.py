"""Networks that read a history.

Start at `history`.
May import `base`, `attention`, `sequence`.
"""

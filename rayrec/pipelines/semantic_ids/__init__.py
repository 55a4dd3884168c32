"""Semantic IDs for the items of a data set.

Start at `tokenization.tokenize`.
May import `tasks` and what is below it.
"""

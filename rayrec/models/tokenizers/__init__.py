"""Semantic IDs: from item vectors to tuples of codes, and the registry that keeps them."""

"""Impressions: what was shown, and what came of it. Data sets of them, and their features."""

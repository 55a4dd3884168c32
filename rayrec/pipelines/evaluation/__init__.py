"""Metrics of a trained run.

Start at `evaluate.evaluate`.
May import `inference` and what is below it.
"""

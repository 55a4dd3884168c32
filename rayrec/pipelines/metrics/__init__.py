"""Metrics of ranking and of responses, with confidence intervals; what stages did.

Start at `ranking_metrics.summarize`.
May import nothing else of the room.
"""

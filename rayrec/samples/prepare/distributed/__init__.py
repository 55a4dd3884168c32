"""Preparation in tasks with files between them: no process holds more than a piece of the log or a partition.

Start at `run.prepare_distributed`.
May import what `prepare` may, and its other files.
"""

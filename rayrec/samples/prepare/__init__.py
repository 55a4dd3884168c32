"""From a log to a data set.

Start at `prepare.prepare`.
May import `dataset`, `importers` and what is below them.
"""

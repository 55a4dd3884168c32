"""A prepared data set on disk.

Start at `dataset.Dataset`.
May import `base`.
"""

"""Rows below memory: a bounded log of records in one file, read past the page cache.

Start at `tiered_rows.TieredRows`.
May import `base` and the rest of `storage`.
"""

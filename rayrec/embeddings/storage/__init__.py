"""Where rows are: the id index, blocks of records in memory, the disk tier, copy-on-write for snapshots.

Start at `row_storage.RowStorage`.
May import `base`, `optim` and `config`.
"""

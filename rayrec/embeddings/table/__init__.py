"""One table: admission, creation, update and eviction of rows.

Start at `table.EmbeddingTable`.
May import `storage` and what is below it.
"""

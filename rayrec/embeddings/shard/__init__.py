"""One server's part of all tables: contributions of a step, commits, reads that wait for a step.

Start at `shard.EmbeddingShard`.
May import `table` and what is below it.
"""

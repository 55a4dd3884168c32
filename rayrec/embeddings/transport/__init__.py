"""Calls from trainers to shards: one protocol; in process and through shared memory.

Start at `protocol` and `client.ShardClient`.
May import `shard` and what is below it.
"""

"""What every part of the sparse engine shares: record layout, routing of ids to shards.

Start at `layout.RecordLayout` and `routing.ShardMap`.
May import nothing else of the room.
"""

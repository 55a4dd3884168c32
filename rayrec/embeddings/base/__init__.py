"""What every part of the sparse engine shares: table settings, record layout, routing of ids to shards.

Start at `config.TableConfig` and `layout.RecordLayout`.
May import nothing else of the room.
"""

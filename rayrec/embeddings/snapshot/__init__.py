"""Tables as files: full snapshots, increments, and chains of them.

Start at `snapshot.write_table` and `snapshot.load_tables`.
May import `table` and what is below it.
"""

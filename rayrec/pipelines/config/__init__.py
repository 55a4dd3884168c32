"""The settings of a run.

Start at `run.RunConfig`.
May import nothing else of the room.
"""

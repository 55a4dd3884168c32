"""Training with actors: from settings to steps, snapshots and recovery.

Start at `train.train`.
May import everything else of the room.
"""

"""Whether a cluster's nodes can be trusted with work: looked at together, tested in pairs, computed again.

Start at `sweep.sweep` and `replay.replay`. May import everything of the room but `nearline`.
"""

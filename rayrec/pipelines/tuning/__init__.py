"""A search for the settings of a run: trials, each a training of its own, judged on validation users.

Start at `tune.tune`.
May import everything else of the room but `health` and `capacity`.
"""

"""What all networks share: settings, keyed random numbers, the dense optimizer, recipes of dense compute.

Start at `config`.
May import nothing else of the room.
"""

"""How a trainer gets rows and returns gradients: the lookup modes.

Start at `lookups.SyncLookups`, which the other modes equal bit for bit.
May import everything else of the room.
"""

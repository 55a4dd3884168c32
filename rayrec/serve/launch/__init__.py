"""Starting a service: in one process, on Ray, with online learning.

Start at `launch.serving`.
May import everything else of the room.
"""

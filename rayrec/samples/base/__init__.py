"""Batches, jagged arrays, intervals of rows and settings that all parts share.

Start at `batches`.
May import nothing else of the room.
"""

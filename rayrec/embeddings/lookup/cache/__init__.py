"""Rows that trainers hold themselves, in host memory or on the device.

Start at `cached_lookups.CachedLookups`.
May import everything else of the room.
"""

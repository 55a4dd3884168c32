"""Published versions of a run: increments that serving follows.

Start at `store.VersionStore`.
May import `inference` and what is below it.
"""

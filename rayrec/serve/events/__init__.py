"""What users did since: intake, each user's newest events, logs.

Start at `intake`.
May import `wire` and what is below it.
"""

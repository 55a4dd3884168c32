"""Where actors go, and what becomes of them: placement, reservation, hangs, deaths.

Start at `placement.actor_groups`.
May import `runs` and what is below it.
"""

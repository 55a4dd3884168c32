"""Which target answers a request, and who gets a copy of it: shares of users, and shadows.

Start at `targets.Router`. May import `config`.
"""

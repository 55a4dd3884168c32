"""The HTTP side: routes, pages, errors, guards, metrics.

Start at `api.build_api`.
May import `protocols` and what is below it.
"""

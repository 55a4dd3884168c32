"""A service put together from its settings.

Start at `loading.load_service`.
May import `web` and what is below it.
"""

"""All settings of a service.

Start at `serve.ServeConfig`.
May import nothing else of the room.
"""

"""Language models as a service: settings, memory plan, engines, and the protocols in front of them.

Start at `api.build_language_api`. Imports all sub-packages to the left of it, and no Ray.
"""

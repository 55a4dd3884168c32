"""The service on Ray Serve: one application, or a deployment for each part.

Start at `serving.serving_on_ray`.
May import `app` and what is below it.
"""

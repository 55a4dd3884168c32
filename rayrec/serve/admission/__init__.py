"""Who may ask how much, and what becomes of a request: limits, cached answers, routing, shadows.

Start at `admission.AdmissionControl`.
May import `engine` and what is below it.
"""

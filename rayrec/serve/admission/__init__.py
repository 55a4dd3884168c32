"""Admission control: limits, cached answers, routing to targets, shadows.

Start at `control.AdmissionControl`.
May import `engine` and what is below it.
"""

"""Admission control: limits and cached answers.

Start at `control.AdmissionControl`.
May import `engine` and what is below it.
"""

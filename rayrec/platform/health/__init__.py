"""Whether a machine can be trusted with work: what it says of itself, and what a short test of it finds.

`counters` reads, `verdict` judges, `burn_in` measures. All of them see the machine through a `Machine`.
"""

"""From settings to a model, and from a model to a program.

Start at `build.build_model`.
May import everything but `keras` and `compiled_ranking`.
"""

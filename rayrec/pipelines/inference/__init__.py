"""Trained models that answer: recommenders, scorers, ranking stages.

Start at `recommender.Recommender`.
May import `tasks` and what is below it.
"""

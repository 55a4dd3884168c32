"""Runs: settings, folders, training loop, snapshots, recovery, evaluation; and trained models that answer.

Start at `training.train.train` and `inference.recommender.Recommender`.
May import `actors`, `samples`, `embeddings`, `models`, `platform`.
"""

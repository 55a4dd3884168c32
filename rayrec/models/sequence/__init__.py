"""Models that read a history and score items one by one.

Start at `sequence_model.SequenceModel`.
May import `base`, `attention`.
"""

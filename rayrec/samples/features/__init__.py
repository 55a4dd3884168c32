"""From rows to what a sequence model reads.

Start at `features.SequenceFeatures`.
May import `operations` and what is below it.
"""

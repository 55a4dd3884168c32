"""The actors of training: thin shells that put plain classes on a cluster.

Start at `spawning.spawn` and `trainer.Trainer`.
May import `samples`, `embeddings`, `models`, `platform`.
"""

"""Ranking models written in Keras 3, on TensorFlow or on PyTorch.

A Keras model is made into a `CtrModel` (`model.py`), so that whatever trains, saves and serves those has
nothing to know of it: rows are gathered, the loss is taken, gradients are summed and AdamW steps in PyTorch,
on weights that TensorFlow reads where they lie.

TensorFlow and Keras are imported inside of functions: this room does without them.
"""

"""The dense part of training behind one protocol, and its implementation for PyTorch.

Start at `program.DenseProgram`.
May import `base`, `attention`.
"""

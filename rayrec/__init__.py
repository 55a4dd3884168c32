"""RayRec: generative recommendation on Ray."""

__version__ = "0.1.0"

"""Attention over histories of different lengths."""

"""Models that emit the semantic ID of the next item, code by code."""

"""Sparse engine: id index, tables, optimizers, sharding. No Ray in here."""

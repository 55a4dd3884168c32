"""Data sets: importers, preparation, resumable reading, features."""

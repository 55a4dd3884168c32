"""Feature operations: what a run declares under `data.features`."""

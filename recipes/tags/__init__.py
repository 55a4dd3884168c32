"""Tags of items, from their titles and pictures."""

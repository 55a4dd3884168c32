"""Whole cases from data to figures, each a thin folder over the commands of RayRec; see README.md here."""
